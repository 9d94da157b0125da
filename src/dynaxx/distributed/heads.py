# SPDX-License-Identifier: Apache-2.0
"""Attention with the heads split over ranks, by all-to-all exchanges before and after attention.

DeepSpeed calls this scheme Ulysses (arXiv 2309.14509). Outside of attention, each rank has its own tokens of all heads;
inside, it has all tokens of its own heads. Patterns and selectors work as on one device, because each rank sees the
whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dynaxx.arguments import typed
from dynaxx.derivatives import first_derivative_only
from dynaxx.distributed.exchange import Transfer
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.rules import Rule, rule_of_heads
from dynaxx.distributed.split import SequenceSplit
from dynaxx.layout import BlockLayout
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.attention import sparse_attention as attend_on_one_device
from dynaxx.selection import Hybrid, Selector, select_blocks


class HeadShare(NamedTuple):
    """The heads of one rank: whole groups of q heads, or part of one group with a copy of its kv head."""

    q_heads: slice
    kv_heads: slice


@typed
def share_heads(q_heads: int, kv_heads: int, ranks: int) -> list[HeadShare]:
    """Return the heads of each rank.

    Raises:
        ValueError: the number of ranks does not divide q_heads, or neither divides kv_heads nor is a multiple of it.
    """
    if q_heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            "the number of ranks must divide `q_heads`, and divide `kv_heads` or be a multiple of it, "
            f"got {ranks} ranks, {q_heads} q heads and {kv_heads} kv heads"
        )
    found = []
    for rank in range(ranks):
        first = rank * kv_heads // ranks
        last = max(first + 1, (rank + 1) * kv_heads // ranks)
        found.append(HeadShare(slice(rank * q_heads // ranks, (rank + 1) * q_heads // ranks), slice(first, last)))
    return found


@typed
def attend_by_heads(
    attend: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    is_query: tuple[bool, ...],
    split: SequenceSplit,
    mesh: Mesh,
) -> Tensor:
    """Call a function on the whole sequence of this rank's heads, and return its result for own tokens.

    Args:
        attend: function (*tensors, share=HeadShare) -> (batch, seqlen, own q heads, dim), which receives all tokens of
            own heads.
        tensors: tensors (batch, own tokens, heads, dim), such as q, k, v and gates.
        is_query: for each tensor, True if its heads are q heads, False if they are kv heads.
        split: which rank owns which tokens.
        mesh: the ranks, as for `dynaxx.distributed.sparse_attention`.

    Returns:
        (batch, own tokens, q_heads, dim). Differentiable.

    Raises:
        ValueError: the heads cannot be divided among the ranks.
        PeerError: another rank failed.
    """
    group = group_of(mesh)
    rank = dist.get_rank(group)
    heads = {
        query: {x.shape[2] for x, own in zip(tensors, is_query, strict=True) if own == query} for query in is_query
    }
    if len(tensors) < 2 or any(len(counts) != 1 for counts in heads.values()) or len(heads) != 2:
        raise ValueError("`tensors` must contain queries and keys, each kind with one number of heads")
    shares = share_heads(heads[True].pop(), heads[False].pop(), split.ranks)
    whole = []
    for x, query in zip(tensors, is_query, strict=True):
        slices = [share.q_heads if query else share.kv_heads for share in shares]
        whole.append(_ToHeads.apply(x, slices, split, rank, group))
    out = attend(*whole, share=shares[rank])
    return _ToTokens.apply(out, [share.q_heads for share in shares], split, rank, group)


@typed
def sparse_attention_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | Rule,
    split: SequenceSplit,
    mesh: Mesh,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 64,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend with the heads split over ranks; inputs and outputs are split by tokens. Differentiable.

    Args:
        q: (batch, own tokens, q_heads, head_dim).
        k: (batch, own tokens, kv_heads, head_dim).
        v: (batch, own tokens, kv_heads, head_dim_v).
        layout: layout of the whole sequence, shared or per q head; or a pattern, selector or hybrid, whose budgets per
            head are distributed to the ranks.
        split: which rank owns which tokens.
        mesh: the ranks that share the sequence.
        causal: hide keys after the query; only for patterns and selectors.
        block_size: tokens per block; only for patterns and selectors.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: as for `dynaxx.sparse_attention`.
        sinks: as for `dynaxx.sparse_attention`.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: as for `dynaxx.sparse_attention`.

    Returns:
        The result of `dynaxx.distributed.sparse_attention`.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `dynaxx.sparse_attention`; ValueError also if the heads
            cannot be divided, or if q heads that select together would lie on several ranks.
        PeerError: another rank failed.
    """
    selector = layout.selector if isinstance(layout, Hybrid) else layout
    if isinstance(selector, Selector) and selector.per == "group" and split.ranks > k.shape[2]:
        raise ValueError(
            f'the rule must have per="head" if {split.ranks} ranks share {k.shape[2]} kv heads, because the q heads of '
            "a group lie on several ranks and cannot select together"
        )

    def attend(q_all: Tensor, k_all: Tensor, v_all: Tensor, *, share: HeadShare) -> Tensor:
        own = layout
        if isinstance(own, BlockLayout):
            own = own.head_slice(range(share.q_heads.start, share.q_heads.stop))
        else:
            own = rule_of_heads(own, share.q_heads, q.shape[2])
            own = select_blocks(q_all, k_all, own, causal=causal, block_size=block_size, scale=scale)
        out, lse = attend_on_one_device(
            q_all,
            k_all,
            v_all,
            own,
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else sinks[share.q_heads],
            return_lse=True,
            backend=backend,
        )
        if not return_lse:
            return out
        return torch.cat([out.to(lse.dtype), lse.transpose(1, 2)[..., None]], -1)

    found = attend_by_heads(attend, (q, k, v), (True, False, False), split, mesh)
    if not return_lse:
        return found
    return SparseAttentionOutput(found[..., :-1].to(q.dtype), found[..., -1].transpose(1, 2))


class _ToHeads(torch.autograd.Function):
    """(batch, own tokens, heads, dim) -> (batch, seqlen, own heads, dim); several ranks may get the same kv head."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slices: list[slice], split: SequenceSplit, rank: int, group: ProcessGroup
    ) -> Tensor:
        ctx.settings = slices, split, rank, group
        ctx.heads = x.shape[2]
        return _gather_tokens(x, slices, split, rank, group)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather_heads(grad, ctx.heads, *ctx.settings), None, None, None, None


class _ToTokens(torch.autograd.Function):
    """(batch, seqlen, own heads, dim) -> (batch, own tokens, heads, dim)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slices: list[slice], split: SequenceSplit, rank: int, group: ProcessGroup
    ) -> Tensor:
        ctx.settings = slices, split, rank, group
        return _gather_heads(x, slices[-1].stop, *ctx.settings)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather_tokens(grad, *ctx.settings), None, None, None, None


def _gather_tokens(x: Tensor, slices: list[slice], split: SequenceSplit, rank: int, group: ProcessGroup) -> Tensor:
    """Send each rank its heads of own tokens; receive own heads of all tokens."""
    by_token = x.transpose(0, 1)
    own = slices[rank]
    found = x.new_empty(split.seqlen, x.shape[0], own.stop - own.start, x.shape[3])
    others = [other for other in range(split.ranks) if other != rank]
    parts = {to: by_token[:, :, slices[to]].contiguous() for to in others}
    lengths = [b - a for a, b in split.runs(rank)]
    sends = [(to, run) for to in others for run in parts[to].split(lengths)]
    receives = [(source, found[a:b]) for source in others for a, b in split.runs(source)]
    transfer = Transfer(sends, receives, group, "exchanging heads")
    for (a, b), run in zip(split.runs(rank), by_token[:, :, own].split(lengths), strict=True):
        found[a:b] = run
    transfer.wait()
    return found.transpose(0, 1)


def _gather_heads(
    x: Tensor, heads: int, slices: list[slice], split: SequenceSplit, rank: int, group: ProcessGroup
) -> Tensor:
    """Send each rank its tokens of own heads; receive all heads of own tokens. Sum heads that several ranks send."""
    by_token = x.transpose(0, 1)
    others = [other for other in range(split.ranks) if other != rank]
    runs = split.runs(rank)
    cut = lambda to: torch.cat([by_token[:0], *(by_token[a:b] for a, b in split.runs(to))])
    shape = lambda source: (split.length(rank), x.shape[0], slices[source].stop - slices[source].start, x.shape[3])
    received = {source: x.new_empty(shape(source)) for source in others}
    transfer = Transfer(
        [(to, cut(to).contiguous()) for to in others], list(received.items()), group, "exchanging heads"
    )
    received[rank] = torch.cat([by_token[:0], *(by_token[a:b] for a, b in runs)])
    transfer.wait()
    copies = sum(part.stop - part.start for part in slices) > heads
    dtype = torch.promote_types(x.dtype, torch.float32) if copies else x.dtype
    found = x.new_zeros(split.length(rank), x.shape[0], heads, x.shape[3], dtype=dtype)
    for source in range(split.ranks):
        found[:, :, slices[source]] += received[source]
    return found.to(x.dtype).transpose(0, 1)
