# SPDX-License-Identifier: Apache-2.0
"""`selected_attention`: every query position attends to its own blocks of keys, which a group of q heads shares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.grid import BLOCK_SIZES
from dynaxx.layout.host import never_traced
from dynaxx.layout.packed import CuSeqlens
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.explain import Explanation
from dynaxx.trained.nsa.spans import NsaSizes, NsaSpans
from dynaxx.trained.packing import pack, packed_problem
from dynaxx.trained.registry import NSA, TOKENS
from dynaxx.trained.tokens.attention import (
    ChosenAttention,
    attend_tokens,
    check_block_size,
    check_scores,
    check_tokens,
    chosen_pairs,
)
from dynaxx.trained.tokens.spans import TOKEN_BLOCKS, TokenSpans


@never_traced
@typed
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int = 64,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend from each query position to the keys of its blocks, up to its own position, exactly. Differentiable.

    Blocks of 1 to 8 tokens, and calls with a softcap, with sinks or with fewer select_heads than kv_heads, are served
    by kernels that read keys one by one; the others by those of Native Sparse Attention.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), aligned to the last keys; packed (tokens, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim); packed without batch.
        v: (batch, seqlen_k, kv_heads, head_dim_v); packed without batch.
        block_indices: (batch, seqlen_q, select_heads, slots), integers in any order, -1 for an empty slot. Blocks
            count from the start of the sequence. Each of the select_heads selects for
            q_heads / select_heads neighbouring q heads; their number divides kv_heads or is a multiple of it.
        block_size: keys per block: 1, 2, 4, 8, 16, 32, 64 or 128.
        cu_seqlens_q: packed inputs only: (num_seqs + 1,) cumulative lengths from 0.
        cu_seqlens_k: packed inputs only: cumulative lengths of the keys; defaults to `cu_seqlens_q`.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: c > 0 caps each score s to c * tanh(s / c), after the scale.
        sinks: (q_heads,), a logit per head that joins each softmax's denominator and has no value.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", "hopper", "triton", "cpu" or "reference".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v), or (out, lse) with lse (batch, q_heads, seqlen_q) fp32; packed
        without batch. A query that sees nothing has out = 0 and lse = -inf.

    Raises:
        ValueError, TypeError: the inputs do not match each other. On a CPU, and on a GPU with DYNAXX_DEBUG=1, also if
            an index is out of range or a query names a block twice; otherwise GPU kernels skip indices out of range.
        UnsupportedInputError: no backend, or not the named one, can serve the call; lists the reasons of each.
    """
    check_block_size(block_size)
    spans, packed = pack(q, k, v, _sizes(block_indices, block_size), cu_seqlens_q, cu_seqlens_k)
    scale = softmax_scale(scale, q.shape[-1])
    token_spans = TokenSpans(spans.ends_q, spans.ends_k, block_size)
    chosen = check_tokens(block_indices, packed, token_spans)
    if _goes_by_token(chosen, packed.k, block_size) or softcap is not None or sinks is not None:
        softcap = check_scores(softcap, sinks, packed.q)
        out, lse = attend_tokens(packed.q, packed.k, packed.v, chosen, token_spans, scale, backend, softcap, sinks)
    else:
        out, lse = attend_selected(packed.q, packed.k, packed.v, chosen, spans, scale, backend)
    out = packed.unpack(out)
    if not return_lse:
        return out
    lse = lse if packed.batch is None else lse.unflatten(1, packed.batch).transpose(0, 1)
    return SparseAttentionOutput(out, lse)


def _sizes(block_indices: Tensor, block_size: int) -> NsaSizes:
    """Return sizes that lay out the sequences; of blocks that are no blocks of NSA, lengths alone matter."""
    if block_size not in BLOCK_SIZES:
        return NsaSizes(16, 16, 16, 1, 0, 0)
    count = block_indices.shape[-1] if block_indices.ndim else 0
    return NsaSizes(block_size, block_size, block_size, max(1, count), 0, 0)


def _goes_by_token(chosen: Tensor, k: Tensor, block_size: int) -> bool:
    """Return whether kernels that read keys one by one serve a choice (T, select_heads, slots)."""
    return block_size in TOKEN_BLOCKS or chosen.shape[1] < k.shape[1]


def nsa_backend(q: Tensor, k: Tensor, v: Tensor, block_size: int, backend: str) -> str:
    """Return the named backend, or for "auto" the first one that can serve packed q, k and v.

    Raises:
        ValueError, UnsupportedInputError: like `selected_attention`.
    """
    return _serving(packed_problem(q, k, v, block_size), backend)


_serving = lru_cache(maxsize=256)(NSA.resolve)


def attend_selected(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spans: NsaSpans, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Choose a backend and call it on packed, checked inputs; return out (T, Hq, E) and lse (Hq, T)."""
    name = nsa_backend(q, k, v, spans.sizes.slc_block, backend)
    kernels = NSA.kernels(name)
    plan = kernels.prepare_selected(indices.contiguous(), spans, q, k, v)
    if name == "reference":
        return kernels.selected_forward(q, k, v, plan, scale)
    pairs = chosen_pairs(indices, q, spans.sizes.slc_block)
    functions = (kernels.selected_forward, kernels.selected_backward)
    out: tuple[Tensor, Tensor] = ChosenAttention.apply(q, k, v, None, *functions, (plan, scale), False, pairs)
    return out


@dataclass(frozen=True)
class SelectedExplanation(Explanation):
    """Result of `explain_selected`. Print it or read its fields."""

    schedule: str = ""  # order in which the chosen backend processes the blocks
    overlap: float = 0.0  # share of a query's blocks that the previous query also selected

    def __str__(self) -> str:
        """Return a line per backend: whether it would run, or the reasons against it."""
        lines = [str(self.problem), f"neighbouring queries share {self.overlap:.0%} of their blocks"]
        for name, why in self.reasons.items():
            verdict = f"would run, {self.schedule}" if name == self.chosen else "; ".join(why) or "could serve too"
            lines.append(f"  {name:<10} {verdict}")
        return "\n".join([*lines, *filter(None, [self.unproven])])


@never_traced
@typed
def explain_selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *, block_size: int = 64, backend: str = "auto"
) -> SelectedExplanation:
    """Report the backend and schedule that `selected_attention` would use, and how similarly neighbours select.

    Reads the selection back from a GPU.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim); packed inputs are not supported.
        k: keys, as for `selected_attention`.
        v: values, as for `selected_attention`.
        block_indices: as for `selected_attention`.
        block_size: as for `selected_attention`.
        backend: "auto" or a backend's name.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `selected_attention`.
    """
    check_block_size(block_size)
    spans, packed = pack(q, k, v, _sizes(block_indices, block_size), None, None)
    if packed.batch is None:
        raise ValueError(f"`q` must be (batch, seqlen, heads, head_dim), got {tuple(q.shape)}")
    chosen = check_tokens(block_indices, packed, TokenSpans(spans.ends_q, spans.ends_k, block_size))
    problem = packed_problem(packed.q, packed.k, packed.v, block_size)
    overlap, schedule = _overlap(block_indices), "token by token, each query its own list"
    if _goes_by_token(chosen, packed.k, block_size):
        name, reasons = TOKENS.resolve(problem, backend), TOKENS.explain(problem)
        return SelectedExplanation(problem, name, reasons, None, schedule, overlap, operation="tokens")
    name, reasons = NSA.resolve(problem, backend), NSA.explain(problem)
    schedule = NSA.kernels(name).schedule_of(q.shape[2] // chosen.shape[1], block_size)
    operation = "native sparse attention"
    return SelectedExplanation(problem, name, reasons, None, schedule, overlap, operation=operation)


def _overlap(block_indices: Tensor) -> float:
    """Return the share of each query's blocks that its predecessor also selected. O(queries x slots x slots)."""
    now, before = block_indices[:, 1:], block_indices[:, :-1]
    shared = ((now[..., :, None] == before[..., None, :]) & (now[..., :, None] >= 0)).sum()
    return float(shared / (now >= 0).sum().clamp(min=1))
