# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention of a decode step over a paged cache, and the compressed tokens that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.host import never_traced
from dynaxx.layout.paging import PagedCache
from dynaxx.layout.paging.pages import SCALED_DTYPES
from dynaxx.ops.decode import sparse_decode
from dynaxx.ops.decode_checks import check_cache, serving
from dynaxx.trained.nsa.compressed_pages import CompressedPages, compressed_of
from dynaxx.trained.nsa.kernels.contract import NsaDecodeKernels
from dynaxx.trained.nsa.spans import NsaSizes
from dynaxx.trained.registry import NSA_DECODE

# How windows become compressed tokens. None: their mean. Tensor: a weighted sum with weights (cmp_block, kv_heads).
# Callable: a function from (windows, cmp_block, kv_heads, dim) to (windows, kv_heads, dim).
Pooling = None | Tensor | Callable[[Tensor], Tensor]
WINDOWS_AT_ONCE = 4096  # windows that one pass compresses, over all sequences


class NsaDecodeOutput(NamedTuple):
    """Result of `nsa_decode`.

    Attributes:
        out: (batch, seqlen_q, q_heads, head_dim_v) in q's dtype.
        block_indices: (batch, seqlen_q, kv_heads, slots) int32, the selection blocks that were read; -1 = empty slot.
    """

    out: Tensor
    block_indices: Tensor


@never_traced
@typed
@torch.no_grad()
def compress_pages(
    cache: PagedCache,
    sizes: NsaSizes | None = None,
    compress_k: Pooling = None,
    compress_v: Pooling = None,
    *,
    new_tokens: int | None = None,
    backend: str = "auto",
) -> PagedCache:
    """Create the compressed tokens that `nsa_decode` needs, or update those of a cache.

    A window is compressed once its last key is in the cache. Compressing a window again gives the same result, so a
    call may cover more tokens than are new. Call this function after writing keys and before the step that reads them.
    Nothing is read back from a GPU.

    Args:
        cache: compressed tokens of the cache are updated in place; if it has none, new ones are created with `sizes`.
        sizes: sizes of the branches; by default those of the existing compressed tokens, whose `cmp_block` and
            `cmp_stride` cannot change.
        compress_k: how windows of keys become tokens. None: their mean; a weight (cmp_block, kv_heads) as for
            `compress`; or a function, such as a module from `dynaxx.trained.nn`.
        compress_v: how windows of values become tokens, like `compress_k`.
        new_tokens: upper bound for the number of keys that were appended or rewritten at the end of any sequence since
            the last call; None: compress all windows, including pages of a prefix that another sequence compressed.
        backend: as for `nsa_decode`.

    Returns:
        The cache with its compressed tokens.

    Raises:
        TypeError: `cache` is not a PagedCache.
        ValueError: pages do not divide selection blocks, the cache has 8-bit values or left padding, or `sizes`
            differs from that of existing compressed tokens.
    """
    _check_cache(cache)
    if cache.compressed is None:
        if sizes is None or new_tokens is not None:
            raise ValueError(
                "a cache without compressed tokens needs `sizes`, and `new_tokens` = None, because all must be computed"
            )
        cache = replace(cache, compressed=CompressedPages.empty(cache, sizes))
    kept = compressed_of(cache)
    if sizes is not None and (sizes.cmp_block, sizes.cmp_stride) != (kept.sizes.cmp_block, kept.sizes.cmp_stride):
        raise ValueError(f"`sizes` must keep cmp_block and cmp_stride of the cache's {kept.sizes}, got {sizes}")
    if new_tokens is not None and new_tokens < 0:
        raise ValueError(f"`new_tokens` must be >= 0, got {new_tokens}")
    if sizes is not None and sizes != kept.sizes:
        cache = replace(cache, compressed=replace(kept, sizes=sizes))
    kernels = NSA_DECODE.kernels(serving(None, cache, backend).backend)
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


@never_traced
@typed
@torch.no_grad()
def nsa_decode(
    q: Tensor,
    cache: PagedCache,
    gates: Tensor,
    *,
    block_indices: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> NsaDecodeOutput:
    """Attend like `native_sparse_attention` from the last tokens of each sequence to a paged cache.

    The result is exact by default: each query selects blocks by its own attention to compressed tokens. Passing the
    `block_indices` of an earlier step skips the selection, which is an approximation. The freely selected blocks then
    come from the earlier step, and the forced blocks are updated to the current position.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim): the last `seqlen_q` tokens of each sequence. Their keys must be in the
            cache already, and compressed (`compress_pages`). More than one token per sequence needs a page table.
        cache: keys, values and compressed tokens. Any group size, ragged lengths and empty sequences are supported.
        gates: (batch, seqlen_q, q_heads, 3), for the compressed, selected and window branch.
        block_indices: (batch, seqlen_q, kv_heads, slots) int32 from an earlier step of these sequences; None: select.
        scale: softmax scale, default head_dim ** -0.5.
        backend: "auto", "triton", "cpu" or "reference", as for `sparse_decode`.

    Returns:
        The output, and the blocks that were read, which later steps may pass in.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `sparse_decode`; ValueError also if the cache has no
            compressed tokens.
    """
    _check_cache(cache)
    kernels = NSA_DECODE.kernels(serving(q, cache, backend).backend)
    compressed_of(cache)
    if gates.shape != (*q.shape[:-1], 3):
        raise ValueError(f"`gates` must be {(*q.shape[:-1], 3)}, got {tuple(gates.shape)}")
    if block_indices is not None and block_indices.shape[:3] != (*q.shape[:2], cache.kv_heads):
        raise ValueError(
            f"`block_indices` must be (batch, seqlen_q, kv_heads) = {(*q.shape[:2], cache.kv_heads)} and then slots, "
            f"got {tuple(block_indices.shape)}"
        )
    scale = softmax_scale(scale, q.shape[-1])
    steps = q.shape[1]
    q, cache = _one_query_each(q, cache)
    kept = None if block_indices is None else block_indices.flatten(0, 1)
    out, blocks = kernels.record_or_replay(_step, cache, (q, gates.flatten(0, 1), kept), kernels, scale, backend)
    return NsaDecodeOutput(out.unflatten(0, (-1, steps)), blocks.unflatten(0, (-1, steps)))


def _step(
    cache: PagedCache,
    q: Tensor,
    gates: Tensor,
    kept: Tensor | None,
    kernels: NsaDecodeKernels,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) and blocks (T, Hk, slots) for one query per sequence."""
    compressed = compressed_of(cache)
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
    """Turn each query into a sequence that ends with it, because queries see different compressed tokens."""
    steps = q.shape[1]
    if steps == 1:
        return q, cache
    if cache.page_table is None:
        raise ValueError("several queries per sequence need a cache with a page table")
    ends = cache.seqused_k[:, None] + torch.arange(1 - steps, 1, dtype=torch.int32, device=q.device)
    table = cache.page_table.repeat_interleave(steps, 0)
    return q.flatten(0, 1)[:, None], replace(cache, seqused_k=ends.flatten().clamp(min=0), page_table=table)


def _check_cache(cache: PagedCache) -> None:
    check_cache(cache)
    if cache.k.dtype in SCALED_DTYPES:
        raise ValueError(f"`cache` must hold floats of 16 bits or more, got {cache.k.dtype}")
    if cache.leftpad_k is not None:
        raise ValueError("`cache` must have no `leftpad_k`, because blocks and windows count from the first key")
