# SPDX-License-Identifier: Apache-2.0
"""Selection of blocks: scores from attention to compressed tokens, then top-k, in chunks of queries.

    q tile x k_cmp tile -> weights exp(q @ k_cmp - lse), summed over a group -> pooled to blocks -> `nsa.top` -> indices

A program of the score kernel holds some compressed tokens. It sums their weights over the q heads of a group, then
pools tokens to blocks: each token contributes to the block in which it starts and, by its overlap, to the next one.

Legend: T queries of a chunk; Hq, Hk, Hs query, kv and selection heads; C blocks of the longest sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.arguments import packed_strides_of, positive_scale, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu import config
from dynaxx.trained.nsa.kernels.gpu.rows import block_rows, gather_rows, weights_of
from dynaxx.trained.nsa.kernels.gpu.top import strides_per, top_blocks
from dynaxx.trained.nsa.spans import NsaSpans

SCORE_BYTES = 256 << 20  # upper bound for the scores in memory
QUERIES = 128  # queries per program of the score kernel
FIELDS = 8  # fields per unit of `RowTiles.units`, 32 bytes, so that any run of units is 16-byte aligned


@kernel_launcher
@triton.jit(do_not_specialize=["first_row", "queries", "group_size", "heads_per_kv", "blocks"])
def _nsa_scores_kernel(
    p_q,
    p_k,
    p_lse,  # (Hq, all queries) contiguous; not read if RAW
    p_own,  # (T, Hs, C) fp32, contributions of tokens to the block in which they start
    p_next,  # (T, Hs, C) fp32, contributions of tokens that start in the previous block; written only if PER_TOKEN > 1
    p_tile_first,
    p_tile_end,
    p_first_cmp,
    p_num_cmp,
    first_row,  # first row of the chunk
    queries,  # number of rows in all chunks
    group_size,
    heads_per_kv,
    blocks,
    scale,
    q_strides,
    k_strides,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PER_TOKEN: tl.constexpr,  # strides per compressed token
    PER_BLOCK: tl.constexpr,  # strides per block
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RAW: tl.constexpr,  # use q @ k_cmp itself as scores
    MAX: tl.constexpr,  # pool by maximum
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = BLOCK_N // PER_BLOCK
    heads = tl.num_programs(0)
    i_head, i_part, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(p_tile_first + i_tile), tl.load(p_tile_end + i_tile)
    most = tl.load(p_num_cmp + end - 1)  # the last query of a sequence sees the most tokens
    if i_part * BLOCK_N < most:
        t = first + tl.arange(0, BLOCK_M)
        inside = t < end
        token = i_part * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = tl.load(p_num_cmp + t, mask=inside, other=0)
        start = tl.load(p_first_cmp + first)
        p_head = p_k + (i_head // heads_per_kv).to(tl.int64) * k_strides.h
        b_k = block_rows(p_head, start + i_part * BLOCK_N, start + most, k_strides.n, D, BLOCK_D, BLOCK_N)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for member in range(group_size):
            h = i_head * group_size + member
            b_q = gather_rows(p_q, t, t * 0 + h, q_strides, inside, D, BLOCK_D)
            scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            if RAW:
                total += scores * scale
            else:
                lse = tl.load(p_lse + h.to(tl.int64) * queries + t, mask=inside, other=float("inf"))
                total += weights_of(scores, lse[:, None], scale, b_q.dtype == tl.float32)
        total = tl.where(token[None, :] < seen[:, None], total, 0.0)
        if PER_BLOCK == 1:
            own = total
        else:
            by_block = tl.reshape(total, [BLOCK_M, BLOCKS, PER_BLOCK])
            shared = tl.minimum(PER_BLOCK - tl.arange(0, PER_BLOCK), PER_TOKEN)[None, None, :]
            own = tl.max(by_block, 2) if MAX else tl.sum(by_block * shared, 2)
        block = i_part * BLOCKS + tl.arange(0, BLOCKS)
        row = ((t - first_row).to(tl.int64) * heads + i_head) * blocks
        mask = inside[:, None] & (block < blocks)[None, :]
        tl.store(p_own + row[:, None] + block[None, :], own, mask=mask)
        if PER_TOKEN > 1:
            over = PER_TOKEN - shared  # strides that lie in the next block; 0 if there are none, as weights are >= 0
            behind = tl.max(tl.where(over > 0, by_block, 0.0), 2) if MAX else tl.sum(by_block * over, 2)
            mask = inside[:, None] & (block + 1 < blocks)[None, :]
            tl.store(p_next + row[:, None] + block[None, :] + 1, behind, mask=mask)


@dataclass(frozen=True)
class RowTiles:
    """Tiles of a few query rows, each within one sequence."""

    bounds: list[tuple[int, int]]  # first row, last row + 1 of each tile
    blocks: list[int]  # number of blocks that the last row sees
    tokens: list[tuple[int, int, int]]  # row of the sequence's token 0; tokens that the first and the last row see
    first: Tensor
    end: Tensor
    known_units: dict[tuple[int, int], tuple[Tensor, list[int]]] = field(default_factory=dict)

    def chunks(self, row_bytes: int) -> Iterator[tuple[slice, int]]:
        """Yield runs of tiles whose scores fit in SCORE_BYTES, each with the largest number of blocks that a row sees.

        A run consists of groups of four tiles, so that its parts of `first` and `end` are 16-byte aligned. The number
        of blocks is rounded up to a multiple of 16.
        """
        begin = 0
        while begin < len(self.bounds):
            stop, most = begin, 0
            while stop < len(self.bounds):
                end = min(stop + 4, len(self.bounds))
                wider = -(-max(most, *self.blocks[stop:end]) // 16) * 16
                rows = self.bounds[end - 1][1] - self.bounds[begin][0]
                if stop > begin and rows * wider * row_bytes > SCORE_BYTES:
                    break
                stop, most = end, wider
            yield slice(begin, stop), most
            begin = stop

    def units(self, some: slice, count: int, step: int) -> Tensor:
        """Return (units, FIELDS) int32: tiles cut into parts of at most `count` compressed tokens.

        Fields: first row, last row + 1, first token, last token + 1, row of token 0, number of tokens that the first
        row sees. The parts of a tile are about equal, in multiples of `step`; the last row of a tile sees tokens in
        each of them.
        """
        if (count, step) not in self.known_units:
            bounds, tokens = (
                torch.tensor(self.bounds, dtype=torch.int64, device="cpu").view(-1, 2),
                torch.tensor(self.tokens, dtype=torch.int64, device="cpu").view(-1, 3),
            )
            parts, steps = -(-tokens[:, 2] // count), -(-tokens[:, 2] // step)
            ends = parts.cumsum(0)
            tile = torch.repeat_interleave(parts)
            part = torch.arange(len(tile), device="cpu") - (ends - parts)[tile]
            units = torch.zeros(len(tile), FIELDS, dtype=torch.int32, device="cpu")
            units[:, :2] = bounds[tile]
            units[:, 2] = part * steps[tile] // parts[tile] * step
            units[:, 3] = ((part + 1) * steps[tile] // parts[tile] * step).minimum(tokens[tile, 2])
            units[:, 4:6] = tokens[tile, :2]
            self.known_units[count, step] = units.to(self.first.device, non_blocking=True), [0, *ends.tolist()]
        known, at = self.known_units[count, step]
        return known[at[some.start] : at[some.stop]]


@dataclass(frozen=True)
class ScoreTensors:
    """Tensors for the scores of some queries, split by where the contributing tokens start."""

    own: Tensor  # (T, Hs, C) fp32, from tokens that start in the block
    behind: Tensor  # (T, Hs, C) fp32, from tokens that start in the previous block; `own` if tokens do not overlap
    first_row: int  # first row of these queries
    tiles: RowTiles  # tiles of all queries
    some: slice  # the tiles of these queries


# A function (q, k_cmp, lse, spans, scores, scale) that fills `scores`.
Scorer = Callable[[Tensor, Tensor, Tensor | None, NsaSpans, ScoreTensors, float], None]

_tiles: WeakKeyDictionary[NsaSpans, dict[int, RowTiles]] = WeakKeyDictionary()


def _tiles_of(spans: NsaSpans, rows: int) -> RowTiles:
    known = _tiles.setdefault(spans, {})
    if rows not in known:
        bounds, blocks, tokens = [], [], []
        sequences = zip(pairwise(spans.ends_q), pairwise(spans.ends_k), spans.ends_cmp[:-1], strict=True)
        for (a, b), (c, d), token in sequences:
            for first in range(a, b, rows):
                bounds.append((first, min(first + rows, b)))
                few, keys = (max(0, row - b + d - c) for row in (first + 1, bounds[-1][1]))  # of first and last row
                blocks.append(-(-keys // spans.sizes.slc_block))
                tokens.append((token, spans.sizes.compressed(few), spans.sizes.compressed(keys)))
        ends = torch.tensor(bounds, dtype=torch.int32, device="cpu").view(-1, 2).to(spans.device, non_blocking=True)
        known[rows] = RowTiles(bounds, blocks, tokens, ends[:, 0].contiguous(), ends[:, 1].contiguous())
    return known[rows]


def score_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NsaSpans, scores: ScoreTensors, scale: float
) -> None:
    """Fill `scores` for tiles of QUERIES rows; this is a `Scorer`."""
    heads, blocks = scores.own.shape[1:]
    per_token, per_block = strides_per(spans.sizes)
    block_n, num_warps, num_stages = config.score_tiles(per_block, q.dtype)
    _nsa_scores_kernel[(heads, -(-blocks * per_block // block_n), scores.some.stop - scores.some.start)](
        q,
        k_cmp,
        scores.own if lse is None else lse.contiguous(),
        scores.own,
        scores.behind,
        scores.tiles.first[scores.some],
        scores.tiles.end[scores.some],
        spans.first_cmp,
        spans.num_cmp,
        first_row=scores.first_row,
        queries=q.shape[0],
        group_size=q.shape[1] // heads,
        heads_per_kv=heads // k_cmp.shape[1],
        blocks=blocks,
        scale=scale,
        q_strides=packed_strides_of(q),
        k_strides=packed_strides_of(k_cmp),
        D=q.shape[2],
        BLOCK_D=padded(q.shape[2]),
        PER_TOKEN=per_token,
        PER_BLOCK=per_block,
        BLOCK_M=QUERIES,
        BLOCK_N=block_n,
        RAW=lse is None,
        MAX=spans.sizes.pool == "max",
        PRECISION="ieee",
        num_warps=num_warps,
        num_stages=num_stages,
    )


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    spans: NsaSpans,
    heads: int,
    scale: float,
    scorer: Scorer = score_blocks,
    tile_rows: int = QUERIES,
) -> Tensor:
    """Return the selected blocks like `kernels.nsa.reference.select_blocks`, with at most SCORE_BYTES of scores.

    Args:
        q: (T, Hq, D).
        k_cmp: (compressed tokens, Hk, D).
        lse: (Hq, T) of the attention to compressed tokens; None: rank by q @ k_cmp.
        spans: lengths of the sequences.
        heads: number of selection heads.
        scale: softmax scale.
        scorer: function that computes the scores, for tiles of `tile_rows` queries.
        tile_rows: query rows per tile.
    """
    sizes = spans.sizes
    indices = torch.empty(q.shape[0], heads, sizes.slc_count, dtype=torch.int32, device=q.device)
    if not (q.shape[0] and spans.max_blocks):
        return indices.fill_(-1)
    if lse is None:
        q, scale = positive_scale(q, scale)
    q, k_cmp = unit_stride(q), unit_stride(k_cmp)
    tiles, (per_token, _) = _tiles_of(spans, tile_rows), strides_per(sizes)
    for some, blocks in tiles.chunks(8 * heads):
        first = tiles.bounds[some.start][0]
        count, blocks = tiles.bounds[some.stop - 1][1] - first, max(16, blocks)
        own = torch.empty(count, heads, blocks, dtype=torch.float32, device=q.device)
        behind = torch.empty_like(own) if per_token > 1 else own
        if k_cmp.shape[0]:
            scores = ScoreTensors(own, behind, first, tiles, some)
            scorer(q, k_cmp, lse, spans, scores, scale)
        top_blocks(own, behind, indices, spans.num_blocks, spans.num_cmp, first, sizes, lse is None)
    return indices
