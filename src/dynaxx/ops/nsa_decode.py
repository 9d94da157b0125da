# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention of a decoding step, over pages: compressed tokens kept with them, blocks chosen, gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.contract import NsaDecodeKernels
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.compressed import CompressedPages
from dynaxx.layout.nsa import NativeSizes
from dynaxx.layout.pages import SCALED_DTYPES
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.decode import sparse_decode
from dynaxx.ops.decode_dispatch import serving

# How windows become tokens: their mean, weights (cmp_block, kv_heads), or a function of (windows, cmp_block, kv_heads,
# dim) that gives (windows, kv_heads, dim).
Pooling = None | Tensor | Callable[[Tensor], Tensor]
WINDOWS_AT_ONCE = 4096  # of all sequences


class NativeDecodeOutput(NamedTuple):
    """What `native_decode` returns.

    Attributes:
        out: (batch, seqlen_q, q_heads, head_dim_v) in q's dtype.
        block_indices: (batch, seqlen_q, kv_heads, slots) int32, selection blocks that were read, -1 is none.
    """

    out: Tensor
    block_indices: Tensor


@typed
@torch.no_grad()
def compress_pages(
    cache: PagedCache,
    sizes: NativeSizes | None = None,
    compress_k: Pooling = None,
    compress_v: Pooling = None,
    *,
    new_tokens: int | None = None,
    backend: str = "auto",
) -> PagedCache:
    """Make the compressed tokens that `native_decode` needs, or bring those of a cache up to date.

    A window is compressed when its last key is there. What is made again is the same, so a call may cover more than is
    new; call it after writing keys and before the step that reads them. Nothing is read back from a GPU.

    Args:
        cache: with compressed tokens: they are updated in place. Without: new ones are made, of these `sizes`.
        sizes: of the branches; those of the cache's own compressed tokens by default, `cmp_block` and `cmp_stride` of
            which stay.
        compress_k, compress_v: how windows become tokens: None, their means; a weight (cmp_block, kv_heads), as
            `compress` takes it; or a function, such as the modules of `dynaxx.nn`.
        new_tokens: the most keys that a sequence has gained (or had rewritten) at its end since the last call; None:
            all of them, pages of a prefix that others compressed included.
        backend: as `native_decode`.

    Returns:
        The cache, with its compressed tokens.

    Raises:
        TypeError: no cache.
        ValueError: pages that do not divide selection blocks, 8-bit caches, left padding, other sizes than before.
    """
    _check_cache(cache)
    if cache.compressed is None:
        if sizes is None or new_tokens is not None:
            raise ValueError("a cache without compressed tokens needs `sizes`, and `new_tokens` = None: all are made")
        cache = replace(cache, compressed=CompressedPages.empty(cache, sizes))
    kept = cache.compressed
    assert kept is not None, "made above"
    if sizes is not None and (sizes.cmp_block, sizes.cmp_stride) != (kept.sizes.cmp_block, kept.sizes.cmp_stride):
        raise ValueError(f"the cache's compressed tokens are of {kept.sizes}, got {sizes}")
    if new_tokens is not None and new_tokens < 0:
        raise ValueError(f"`new_tokens` must be >= 0, got {new_tokens}")
    if sizes is not None and sizes != kept.sizes:
        cache = replace(cache, compressed=replace(kept, sizes=sizes))
    kernels = serving(None, cache, backend).nsa
    total = kept.sizes.compressed(cache.max_keys)
    if new_tokens is not None:
        total = min(total, -(-new_tokens // kept.sizes.cmp_stride))
    step = max(1, WINDOWS_AT_ONCE // max(1, cache.batch))
    for skip in range(0, total if cache.batch else 0, step):
        count = min(step, total - skip)
        if not (callable(compress_k) or callable(compress_v)):
            kernels.compress_windows(cache, (compress_k, compress_v), count, skip)
            continue
        k, v = kernels.gather_windows(cache, kept.sizes, count, skip)
        k_cmp, v_cmp = (_pooled(x, how) for x, how in ((k, compress_k), (v, compress_v)))
        kernels.store_compressed(cache, kept, k_cmp, v_cmp, count, skip)
    return cache


def _pooled(windows: Tensor, how: Pooling) -> Tensor:
    if how is None:
        return windows.mean(1)
    return how(windows) if callable(how) else torch.einsum("wlhd,lh->whd", windows, how.to(windows.dtype))


@typed
@torch.no_grad()
def native_decode(
    q: Tensor,
    cache: PagedCache,
    gates: Tensor,
    *,
    block_indices: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> NativeDecodeOutput:
    """Attend from the last tokens of each sequence as `native_sparse_attention` does, over a paged cache.

    Exact by default: the blocks of each query are chosen by its own attention to compressed tokens. With
    `block_indices`, what an earlier step returned, that choice is spared and the result approximate: the free blocks
    are those of then, the forced ones those of now.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim): the last `seqlen_q` tokens of each sequence, whose keys are in the
            cache already and compressed (`compress_pages`). More than one need a page table.
        cache: keys, values and compressed tokens. Any group size; ragged lengths, empty sequences too.
        gates: (batch, seqlen_q, q_heads, 3), of the compressed, selected and window branch.
        block_indices: (batch, seqlen_q, kv_heads, slots) int32 of an earlier step of these sequences; None: choose.
        scale: softmax scale, default head_dim ** -0.5.
        backend: "auto", or "triton", "cpu", "reference", as `sparse_decode`.

    Returns:
        out, and the blocks read. Later steps may pass these on.

    Raises:
        ValueError, TypeError, UnsupportedInputError: as `sparse_decode`; a cache without compressed tokens.
    """
    _check_cache(cache)
    kernels = serving(q, cache, backend).nsa
    if cache.compressed is None:
        raise ValueError("`cache` must have compressed tokens: cache = compress_pages(cache, sizes, ...)")
    if gates.shape != (*q.shape[:-1], 3):
        raise ValueError(f"`gates` must be {(*q.shape[:-1], 3)}, got {tuple(gates.shape)}")
    if block_indices is not None and block_indices.shape[:3] != (*q.shape[:2], cache.kv_heads):
        raise ValueError(
            f"`block_indices` must be (batch, seqlen_q, kv_heads, slots) = {(*q.shape[:2], cache.kv_heads)} and slots, "
            f"got {tuple(block_indices.shape)}"
        )
    scale = softmax_scale(scale, q.shape[-1])
    steps = q.shape[1]
    q, cache = _one_query_each(q, cache)
    kept = None if block_indices is None else block_indices.flatten(0, 1)
    out, blocks = kernels.record_or_replay(_step, cache, (q, gates.flatten(0, 1), kept), kernels, scale, backend)
    return NativeDecodeOutput(out.unflatten(0, (-1, steps)), blocks.unflatten(0, (-1, steps)))


def _step(
    cache: PagedCache,
    q: Tensor,
    gates: Tensor,
    kept: Tensor | None,
    kernels: NsaDecodeKernels,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Out (T, Hq, E) and blocks (T, Hk, slots) of one query per sequence."""
    compressed = cache.compressed
    assert compressed is not None, "checked before"
    sizes = compressed.sizes
    attend = lambda pages, of: sparse_decode(q, of, pages, scale=scale, return_lse=True, backend=backend)
    lengths = kernels.step_lengths(cache.seqused_k, sizes)
    tokens = compressed.as_cache(cache, lengths)
    out_cmp, lse = attend(None, tokens)
    if kept is None:
        blocks = kernels.select_blocks(q, tokens, lse, lengths, sizes, -(-cache.max_keys // sizes.slc_block), scale)
    else:
        blocks = kernels.kept_blocks(kept, lengths, sizes)
    out_slc, _ = attend(kernels.pages_of(blocks, sizes.slc_block // cache.page_size, cache.max_pages), cache)
    out_swa, _ = attend(None, replace(cache, leftpad_k=lengths.window, compressed=None))
    outs = out_cmp.flatten(0, 1), out_slc.flatten(0, 1), out_swa.flatten(0, 1)
    return kernels.gated_sum(outs, gates), blocks


def _one_query_each(q: Tensor, cache: PagedCache) -> tuple[Tensor, PagedCache]:
    """Each query as a sequence of its own, which ends with it: they see different compressed tokens."""
    steps = q.shape[1]
    if steps == 1:
        return q, cache
    if cache.page_table is None:
        raise ValueError("several queries of a sequence need a cache with a page table")
    ends = cache.seqused_k[:, None] + torch.arange(1 - steps, 1, dtype=torch.int32, device=q.device)
    table = cache.page_table.repeat_interleave(steps, 0)
    return q.flatten(0, 1)[:, None], replace(cache, seqused_k=ends.flatten().clamp(min=0), page_table=table)


def _check_cache(cache: PagedCache) -> None:
    if not isinstance(cache, PagedCache):
        raise TypeError(f"`cache` must be a PagedCache, got {type(cache).__name__}")
    if cache.k.dtype in SCALED_DTYPES:
        raise ValueError(f"`cache` must hold floats of 16 bits or more, got {cache.k.dtype}")
    if cache.leftpad_k is not None:
        raise ValueError("`cache` must have no `leftpad_k`: blocks and windows are counted from a sequence's first key")
