# SPDX-License-Identifier: Apache-2.0
"""Reference definition of decoding with native sparse attention: compression of new windows, and selection of blocks.

Legend: B sequences with one query each; W windows per sequence; Hq, Hk query and kv heads; D head_dim of q and k, E
head_dim of v; L compressed tokens; P logical pages; n selected blocks. `trained.nsa.compressed_pages.CompressedPages`
defines the positions of compressed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.decode.reference import read_keys
from dynaxx.layout.host import without_autocast
from dynaxx.layout.paging import PagedCache
from dynaxx.trained.nsa.compressed_pages import CompressedPages, NsaLengths, compressed_of
from dynaxx.trained.nsa.kernels.reference import choose_blocks, gated_sum
from dynaxx.trained.nsa.spans import NsaSizes

__all__ = [
    "compress_windows",
    "gated_sum",
    "gather_windows",
    "kept_blocks",
    "pages_of",
    "record_or_replay",
    "select_blocks",
    "step_lengths",
    "store_compressed",
]

Call = Callable[..., tuple[Tensor, ...]]


def record_or_replay(call: Call, inputs: PagedCache, tensors: tuple[Tensor | None, ...], *settings: Any) -> Any:
    """Return `call(inputs, *tensors, *settings)`; GPU backends record the call and replay its launches."""
    return call(inputs, *tensors, *settings)


def step_lengths(seqused: Tensor, sizes: NsaSizes) -> NsaLengths:
    """Return the lengths that each branch reads, for the last query of each sequence."""
    per = lambda add, step: ((seqused + add).div(step, rounding_mode="floor")).clamp(min=0).int()
    return NsaLengths(
        positions=per(0, sizes.cmp_stride),
        hidden=torch.full_like(seqused, sizes.cmp_block // sizes.cmp_stride - 1),
        tokens=per(sizes.cmp_stride - sizes.cmp_block, sizes.cmp_stride),
        blocks=per(sizes.slc_block - 1, sizes.slc_block),
        window=per(-sizes.window, 1),
    )


def gather_windows(cache: PagedCache, sizes: NsaSizes, count: int, skip: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the last `count` complete windows of each sequence, excluding the last `skip`.

    Shapes are (B * W, cmp_block, Hk, D) and (B * W, cmp_block, Hk, E), ascending. Windows before a sequence's first one
    have arbitrary contents.
    """
    first = _windows(cache, sizes, count, skip).clamp(min=0) * sizes.cmp_stride
    position = (first[..., None] + torch.arange(sizes.cmp_block, device=cache.device)).flatten(1)  # (B, W * cmp_block)
    where = _places(cache, position.clamp(max=cache.max_keys - 1), cache.page_size)
    gather = lambda x: x[where].unflatten(1, (count, -1)).flatten(0, 1)
    return gather(cache.k), gather(cache.v)


@without_autocast
def compress_windows(cache: PagedCache, weights: tuple[Tensor | None, Tensor | None], count: int, skip: int) -> None:
    """Store weighted sums, or means, of the windows of `gather_windows`; weights (cmp_block, Hk) for k and for v."""

    def pool(windows: Tensor, weight: Tensor | None) -> Tensor:
        wide = windows.to(torch.promote_types(windows.dtype, torch.float32))
        return wide.mean(1) if weight is None else torch.einsum("wlhd,lh->whd", wide, weight.to(wide.dtype))

    compressed = compressed_of(cache)
    k, v = gather_windows(cache, compressed.sizes, count, skip)
    store_compressed(cache, compressed, pool(k, weights[0]), pool(v, weights[1]), count, skip)


def kept_blocks(blocks: Tensor, lengths: NsaLengths, sizes: NsaSizes) -> Tensor:
    """Return (B, Hk, n + forced) int32: the free blocks of an earlier selection, then the current forced blocks."""
    seen = lengths.blocks[:, None, None]
    local = seen - sizes.local_blocks
    free = torch.where((blocks >= sizes.first_blocks) & (blocks < local), blocks, -1)[..., : sizes.slc_count]
    first = torch.arange(sizes.first_blocks, device=blocks.device).expand(*blocks.shape[:2], -1)
    last = local + torch.arange(sizes.local_blocks, device=blocks.device)
    last = torch.where(last >= sizes.first_blocks, last, -1).expand(*blocks.shape[:2], -1)
    return torch.cat([free, torch.where(first < seen, first, -1), last], -1).int()


def pages_of(blocks: Tensor, pages_per_block: int, max_pages: int) -> Tensor:
    """Return (B, Hk, slots * pages_per_block), the pages of blocks (B, Hk, slots); -1 for pages beyond the table."""
    if pages_per_block == 1:
        return blocks
    part = torch.arange(pages_per_block, dtype=torch.int32, device=blocks.device)
    pages = blocks[..., None] * pages_per_block + part
    return torch.where((blocks[..., None] >= 0) & (pages < max_pages), pages, -1).flatten(2)


def store_compressed(
    cache: PagedCache, compressed: CompressedPages, k_cmp: Tensor, v_cmp: Tensor, count: int, skip: int
) -> None:
    """Store compressed windows (B * W, Hk, D) and (B * W, Hk, E) of `gather_windows`, if the window exists."""
    window = _windows(cache, compressed.sizes, count, skip)
    page_size = cache.page_size // compressed.sizes.cmp_stride
    entry, which = (window >= 0).nonzero(as_tuple=True)
    where = _places(cache, window.clamp(min=0) + compressed.hidden, page_size)
    for kept, new in ((compressed.k, k_cmp), (compressed.v, v_cmp)):
        places = tuple(part.expand_as(window)[entry, which] for part in where)
        kept[places] = new.unflatten(0, window.shape)[entry, which].to(kept.dtype)


@without_autocast
def select_blocks(
    q: Tensor, cache: PagedCache, lse: Tensor, lengths: NsaLengths, sizes: NsaSizes, max_blocks: int, scale: float
) -> Tensor:
    """Return the blocks of each sequence's last query, (B, Hk, n) int32, ascending, padded with -1.

    Like `kernels.nsa.reference.select_blocks`, but over paged compressed tokens.

    Args:
        q: (B, 1, Hq, D).
        cache: cache of the compressed tokens.
        lse: (B, Hq, 1) of q's attention to the compressed tokens.
        lengths: lengths that each branch reads.
        sizes: sizes of the branches.
        max_blocks: largest number of selection blocks per sequence.
        scale: softmax scale.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = read_keys(cache, dtype)[:, sizes.cmp_block // sizes.cmp_stride - 1 :]  # (B, L, Hk, D)
    visible = torch.arange(keys.shape[1], device=q.device) < lengths.tokens[:, None]
    keys = keys.masked_fill(~visible[..., None, None], 0.0)
    grouped = q[:, 0].to(dtype).unflatten(1, (cache.kv_heads, -1))
    logits = torch.einsum("bhgd,blhd->bhgl", grouped, keys) * scale
    shift = lse.to(dtype).masked_fill(lse == -torch.inf, 0.0).view(*grouped.shape[:3], 1)
    weights = (logits - shift).exp().masked_fill(~visible[:, None, None], 0.0).sum(2)  # (B, Hk, L)
    return choose_blocks(block_scores(weights, sizes, max_blocks), lengths.blocks, sizes)


def block_scores(weights: Tensor, sizes: NsaSizes, blocks: int) -> Tensor:
    """Pool (.., .., l) weights over the strides of each compressed token and each block; return (.., .., blocks)."""
    per_token, per_block = sizes.cmp_block // sizes.cmp_stride, sizes.slc_block // sizes.cmp_stride
    total = blocks * per_block
    strides = weights.new_zeros(*weights.shape[:2], max(total, weights.shape[2] + per_token - 1))
    most = sizes.pool == "max"
    for shift in range(per_token):
        part = strides[..., shift : shift + weights.shape[2]]
        torch.maximum(part, weights, out=part) if most else part.add_(weights)
    by_block = strides[..., :total].unflatten(-1, (blocks, per_block))
    return by_block.amax(-1) if most else by_block.sum(-1)


def _windows(cache: PagedCache, sizes: NsaSizes, count: int, skip: int) -> Tensor:
    """Return indices of windows, (B, count); negative for windows that do not exist."""
    whole = torch.div(cache.seqused_k - sizes.cmp_block, sizes.cmp_stride, rounding_mode="floor") + 1
    return whole.long()[:, None] - skip - count + torch.arange(count, device=cache.device)


def _places(cache: PagedCache, position: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Return (B, N) positions as two indices into the cache's tensors; arbitrary for positions that do not exist."""
    if cache.page_table is None:
        return torch.arange(cache.batch, device=cache.device)[:, None].expand_as(position), position
    page = cache.page_table.long().gather(1, position // page_size)
    return page.clamp(min=0), position % page_size
