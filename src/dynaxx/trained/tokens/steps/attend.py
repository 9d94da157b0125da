# SPDX-License-Identifier: Apache-2.0
"""`selected_decode`: a decoding step over chosen tokens, and `dynaxx::selected_decode`, the op of traced graphs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import refuse_transforms
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.entries import has_duplicates
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.checks import looks_at_values
from dynaxx.ops.decode_checks import check_cache, check_queries, check_values, decode_problem
from dynaxx.ops.flops import count
from dynaxx.ops.library import empty_results
from dynaxx.trained.registry import TOKEN_DECODE
from dynaxx.trained.tokens.attention import (
    check_block_size,
    check_choice,
    check_scores,
    chosen_pairs,
    refuse_duplicates,
)

_serving_decode = lru_cache(maxsize=256)(TOKEN_DECODE.resolve)


@typed
@torch.no_grad()
def selected_decode(
    q: Tensor,
    cache: PagedCache,
    block_indices: Tensor,
    *,
    block_size: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend from the last tokens of each sequence to the tokens of its cache that each of them chose.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim): the last `seqlen_q` tokens, whose keys are in the cache already.
        cache: keys and values, in pages or contiguous. fp8 and int8 are dequantized exactly. For latent attention (MLA)
            its v is the view k[..., :head_dim_v].
        block_indices: (batch, seqlen_q, select_heads, slots), integers in any order, -1 for an empty slot: blocks of
            `block_size` tokens, counted from the start of the sequence. Keys after the query are hidden.
        block_size: tokens that are chosen together: 1, 2, 4, 8, 16, 32, 64 or 128.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: as in `sparse_decode`.
        sinks: as in `sparse_decode`.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", or "triton", "cpu", "reference".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v) in q's dtype, or (out, lse), lse (batch, q_heads, seqlen_q) fp32. A
        query that sees nothing gives out = 0, lse = -inf.

    Raises:
        ValueError, TypeError: inputs that do not fit together. Values are checked on a CPU, on a GPU only with
            DYNAXX_DEBUG=1.
        UnsupportedInputError: no backend, or not the named one, can serve; with the reasons of each.
    """
    step = _traced_step if torch.compiler.is_compiling() else attend_step
    out, lse = step(q, cache, block_indices, block_size, scale, softcap, sinks, backend)
    return SparseAttentionOutput(out, lse) if return_lse else out


def attend_step(
    q: Tensor,
    cache: PagedCache,
    block_indices: Tensor,
    block_size: int,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of `selected_decode`, choose a backend, and return its out and lse."""
    refuse_transforms("`selected_decode`", q, fix="pass the mapped dimension as the batch")
    check_cache(cache)
    check_queries(q, cache)
    check_values(cache)
    check_block_size(block_size)
    softcap = check_scores(softcap, sinks, q)
    check_choice(block_indices, (q.shape[0], q.shape[1]), q.shape[2], cache.kv_heads, q.device)
    if looks_at_values(q.device) and block_indices.numel():
        least, most = (int(x) for x in block_indices.aminmax())
        limit = -(-cache.max_keys // block_size)
        if least < -1 or most >= limit:
            raise ValueError(f"`block_indices` must hold -1 or blocks below {limit}, got {least} to {most}")
        if has_duplicates(block_indices.to(torch.int32).flatten(0, 2)):
            refuse_duplicates()
    name = _serving_decode(decode_problem(cache, q), backend)
    kernels = TOKEN_DECODE.kernels(name)
    scale = softmax_scale(scale, q.shape[-1])
    if name != "reference":
        count(
            2 * chosen_pairs(block_indices.flatten(0, 1), q.flatten(0, 1), block_size) * (q.shape[3] + cache.head_dim_v)
        )
    return kernels.attend_tokens(q, cache, block_indices.to(torch.int32), block_size, scale, softcap, sinks)


@torch.library.custom_op("dynaxx::selected_decode", mutates_args=())
def selected_decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    page_table: Tensor | None,
    page_size: int,
    leftpad_k: Tensor | None,
    scales: list[Tensor],
    block_indices: Tensor,
    block_size: int,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of `selected_decode`; `scales` are those of k and v of an 8-bit cache, or nothing."""
    k_scale, v_scale = scales or (None, None)
    cache = PagedCache(k, v, seqused_k, page_table, page_size, leftpad_k, k_scale, v_scale)
    out, lse = attend_step(q, cache, block_indices, block_size, scale, softcap, sinks, backend)
    return out.contiguous(), lse.contiguous()


@selected_decode_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)


def _traced_step(q: Tensor, cache: PagedCache, *settings: Any) -> tuple[Tensor, Tensor]:
    """Return out and lse by the op.

    Raises:
        ValueError: a cache with exact tokens beside it.
    """
    if cache.exact is not None:
        raise ValueError("`cache` must have no exact tokens under torch.compile; decode with them eagerly")
    scales = [x for x in (cache.k_scale, cache.v_scale) if x is not None]
    return selected_decode_op(
        q, cache.k, cache.v, cache.seqused_k, cache.page_table, cache.page_size, cache.leftpad_k, scales, *settings
    )  # fmt: skip
