# SPDX-License-Identifier: Apache-2.0
"""Statistics of attention maps, one head at a time and a chunk of its rows at a time.

The memory is a few megabytes at any length. Maps are exact. Texts longer than `MAX_ROWS` tokens are sampled by query
blocks, and the statistics contain the number of sampled rows.

Shapes: N tokens, H q heads, D head_dim, R rows of a chunk, C keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dynaxx.lab.analyze.capture import HIDDEN, LayerAttention, attention_scores
from dynaxx.layout import FULL, BlockLayout

CHUNK_ROWS = 128  # 2 MB of scores at 4,096 keys, which stay in a CPU's cache
MAX_ROWS = 4096  # largest number of rows of a map; longer texts are sampled
SINK_TOKENS = 4
LOCAL_TOKENS = 64

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class MapStatistics:
    """Statistics of one head's attention map. Each row of the map sums to 1, so every mass is a number of rows."""

    rows: int  # number of sampled rows
    block_size: int
    lse: Tensor  # (N,) natural log of each row's softmax denominator; 0 for rows that were not sampled
    block_mass: Tensor  # (blocks, blocks) mass of each block; 0 in rows that were not sampled
    by_distance: Tensor  # (N,) mass at each distance query - key
    by_slash: Tensor  # (N,) mass at each distance, without the first SINK_TOKENS keys
    by_vertical: Tensor  # (N,) mass on each key, without distances below LOCAL_TOKENS and the first SINK_TOKENS keys
    sink_mass: float  # mass on the first SINK_TOKENS keys
    entropy: float  # mean over rows, nats
    heatmap: Tensor  # (cells, cells), cells <= 64: mean share of a row's attention in a range of keys


def sampled_blocks(seqlen: int, block_size: int) -> Tensor:
    """Return the sampled query blocks, (n,) int64: all, or evenly spaced ones with MAX_ROWS rows in total."""
    blocks = -(-seqlen // block_size)
    most = max(1, MAX_ROWS // block_size)
    return (
        torch.arange(blocks, device="cpu")
        if blocks <= most
        else torch.linspace(0, blocks - 1, most, dtype=torch.float32, device="cpu").round().long()
    )


def map_statistics(attention: LayerAttention, head: int, *, block_size: int, cells: int = 64) -> MapStatistics:
    """Compute the statistics of one head's exact map, a chunk of rows at a time.

    Args:
        attention: a layer.
        head: index among its q heads.
        block_size: tokens per block.
        cells: largest number of rows and columns of the heat map.
    """
    q, k = attention.q[:, head].float().contiguous(), attention.k[:, head].float().contiguous()
    seqlen, blocks = q.shape[0], -(-q.shape[0] // block_size)
    cell = -(-seqlen // cells)
    zeros = lambda *shape: torch.zeros(*shape, device=q.device, dtype=torch.float32)
    lse, block_mass, by_distance, by_vertical = zeros(seqlen), zeros(blocks, blocks), zeros(seqlen), zeros(seqlen)
    heat, heat_rows = zeros(-(-seqlen // cell), -(-seqlen // cell)), zeros(-(-seqlen // cell))
    sinks, entropy, rows = zeros(seqlen, min(SINK_TOKENS, seqlen)), 0.0, 0
    for first, last in _chunks(sampled_blocks(seqlen, block_size), block_size, seqlen):
        height = last - first
        width = max(-(-last // size) * size for size in (block_size, cell))  # whole blocks and whole cells
        share, lse[first:last], chunk_entropy = _softmax_chunk(attention, q, k, first, last)
        # A margin of `height` zeros on the left makes every diagonal of the chunk a column of a strided view.
        padded = torch.nn.functional.pad(share, (height, width - last))
        inside = padded[:, height:]
        by_row = torch.arange(first, last, device=q.device)
        block_mass.index_add_(0, by_row // block_size, _pooled(inside, block_size, blocks))
        if cell != block_size:
            heat.index_add_(0, by_row // cell, _pooled(inside, cell, len(heat)))
        heat_rows.index_add_(0, by_row // cell, torch.ones(height, device=q.device, dtype=torch.float32))
        diagonals = padded.as_strided((height, width + 1), (padded.stride(0) + 1, 1))  # column j: distance last - j
        by_distance[:last] += diagonals.sum(0)[1 : last + 1].flip(0)
        sinks[first:last] = inside[:, : sinks.shape[1]]
        inside[:, : sinks.shape[1]] = 0.0
        diagonals[:, max(0, last - LOCAL_TOKENS + 1) : last + 1] = 0.0
        by_vertical[:last] += inside[:, :last].sum(0)
        entropy, rows = entropy + float(chunk_entropy.sum()), rows + height
    by_slash = by_distance.clone()
    for column in range(sinks.shape[1]):
        by_slash[: seqlen - column] -= sinks[column:, column]
    return MapStatistics(
        rows=rows,
        block_size=block_size,
        lse=lse,
        block_mass=block_mass,
        by_distance=by_distance,
        by_slash=by_slash.clamp(min=0),
        by_vertical=by_vertical,
        sink_mass=float(sinks.sum()),
        entropy=entropy / rows,
        heatmap=_filled(block_mass if cell == block_size else heat, heat_rows),
    )


def whole_map(attention: LayerAttention, head: int) -> Tensor:
    """Compute one head's map, (N, N) fp32, with rows that sum to 1. Use it for short texts only."""
    q, k = attention.q[:, head].float(), attention.k[:, head].float()
    return _softmax_chunk(attention, q, k, 0, len(q))[0]


def _chunks(blocks: Tensor, block_size: int, seqlen: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last rows of the blocks, with neighbours joined up to CHUNK_ROWS."""
    at_once = max(1, CHUNK_ROWS // block_size)
    start = 0
    listed = [int(block) for block in blocks]
    while start < len(listed):
        stop = start + 1
        while stop < len(listed) and stop - start < at_once and listed[stop] == listed[stop - 1] + 1:
            stop += 1
        yield listed[start] * block_size, min(seqlen, (listed[stop - 1] + 1) * block_size)
        start = stop


def _softmax_chunk(
    attention: LayerAttention, q: Tensor, k: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute rows first .. last of the map over keys 0 .. last, (R, C), and their lse and entropy in nats, (R,)."""
    scores = attention_scores(q[first:last], k[:last], attention.scale, attention.softcap)
    if attention.mask is not None:
        scores.masked_fill_(~attention.mask[first:last, :last], HIDDEN)
    else:
        corner = scores[:, first:]
        corner.masked_fill_(torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu_(1), HIDDEN)
    top = scores.amax(-1, keepdim=True)
    scores -= top
    share = scores.exp()
    total = share.sum(-1, keepdim=True)
    share /= total
    entropy = total.log()[:, 0] - torch.einsum("rc,rc->r", share, scores)
    return share, (top + total.log())[:, 0], entropy


def _pooled(share: Tensor, size: int, count: int) -> Tensor:
    """Sum `size` neighbours, (R, C) -> (R, count); columns past the end are cut or 0."""
    sums = share[:, : share.shape[1] // size * size].unflatten(1, (-1, size)).sum(-1)[:, :count]
    return torch.nn.functional.pad(sums, (0, count - sums.shape[1]))


def _filled(heat: Tensor, rows: Tensor) -> Tensor:
    """Average each range of rows. A range without a sampled row repeats the range above."""
    heat = heat / rows.clamp(min=1)[:, None]
    index = torch.where(rows > 0, torch.arange(len(rows), device=rows.device), 0).cummax(0).values
    return heat[index]


def visible_mass(attention: LayerAttention, statistics: Sequence[MapStatistics], layout: BlockLayout) -> Tensor:
    """Sum each head's attention over the visible pairs of a layout, exactly.

    The mass of whole blocks is in the statistics. Partial blocks that hide more than causality does are recomputed from
    q and k.

    Args:
        attention: a layer of H q heads.
        statistics: the statistics of each head.
        layout: a layout, shared or with one per head.

    Returns:
        (H,) fp32.
    """
    heads = len(statistics)
    flat_rows, cols, mask_ids = layout.entries()
    head, rows = flat_rows // layout.q_blocks, flat_rows % layout.q_blocks
    if layout.layout_heads == 1:
        head = torch.arange(heads, device=flat_rows.device).repeat_interleave(len(flat_rows))
        rows, cols, mask_ids = rows.repeat(heads), cols.repeat(heads), mask_ids.repeat(heads)
    mass = torch.stack([each.block_mass for each in statistics])[head, rows, cols]
    partial = (mask_ids != FULL) & ~_only_causal(layout, rows, cols, mask_ids) & (mass > 0)
    if partial.any():
        mass[partial] = _partial_mass(attention, statistics, layout, head, rows, cols, mask_ids, partial)
    return torch.zeros(heads, device=mass.device, dtype=torch.float32).index_add_(0, head, mass)


def _partial_mass(
    attention: LayerAttention,
    statistics: Sequence[MapStatistics],
    layout: BlockLayout,
    head: Tensor,
    rows: Tensor,
    cols: Tensor,
    mask_ids: Tensor,
    partial: Tensor,
) -> Tensor:
    """Return the mass on the visible pairs of some partial blocks, (n,)."""
    seqlen, size = attention.q.shape[0], statistics[0].block_size
    head, rows, cols, mask_ids = head[partial], rows[partial], cols[partial], mask_ids[partial]
    within = torch.arange(size, device=rows.device)
    q_pos, k_pos = rows[:, None] * size + within, cols[:, None] * size + within  # (n, size)
    shown = (q_pos < seqlen)[:, :, None] & (k_pos < seqlen)[:, None, :] & layout.masks.to_dense()[mask_ids]
    q_pos, k_pos = q_pos.clamp(max=seqlen - 1), k_pos.clamp(max=seqlen - 1)
    if attention.mask is None:
        shown &= k_pos[:, None, :] <= q_pos[:, :, None]
    else:
        shown &= attention.mask[q_pos[:, :, None], k_pos[:, None, :]]
    q, k = attention.q[q_pos, head[:, None]].float(), attention.k[k_pos, head[:, None]].float()
    lse = torch.stack([each.lse for each in statistics])[head[:, None], q_pos]
    share = (attention_scores(q, k, attention.scale, attention.softcap) - lse[:, :, None]).exp()
    return share.masked_fill(~shown, 0.0).sum((1, 2))


def _only_causal(layout: BlockLayout, rows: Tensor, cols: Tensor, mask_ids: Tensor) -> Tensor:
    """Return whether each block's mask hides only keys after the query."""
    if not len(layout.masks):
        return torch.zeros_like(mask_ids, dtype=torch.bool)
    q_block, kv_block = layout.block_size
    bands = layout.masks.bands[mask_ids.clamp(min=0)]
    first = rows * q_block + (layout.seqlen_k - layout.seqlen_q) - cols * kv_block
    return (bands[:, 0] <= -first) & (bands[:, 1] >= q_block - 1)


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item], device: torch.device) -> Iterator[Result]:
    """Map over items in order. On a CPU, use as many threads as torch, with one thread per item.

    Statistics consist of many small operations, for which one thread per item is faster than several threads per
    operation.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield from pool.map(torch.no_grad()(work), items)
        finally:
            torch.set_num_threads(threads)  # the default for later threads
