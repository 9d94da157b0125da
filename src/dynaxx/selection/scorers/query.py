"""Blocks by what a row's mean query pays to each of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import MEMORY_BUDGET, Scorer, ScoreRows, per_kv_head, pieces
from dynaxx.selection.scorers.eight_bits import center_of, int8_scores_by_torch
from dynaxx.selection.scorers.pooling import mean_tiles


@dataclass(frozen=True)
class MeanQuery(Scorer):
    """The mean query of a block against every key: a kv block's score is the log of the sum of what its keys get.

    Keys differ more than neighbouring queries do, so nothing of a key is summarised away: one that draws all attention
    counts with its own score. That costs a share 1 / q_block of the attention map, one product and one sum on a GPU.
    What it overlooks is a query's own neighbourhood, where rotary embeddings make queries of a block differ; show that
    by a pattern, such as `SlidingWindow` or `LocalBlocks`.

    Args:
        sharpness: factor on the scores. Queries spread their attention over more keys than their mean does.
    """

    sharpness: float = 0.75
    precision: Literal["full", "int8"] = "full"

    def __post_init__(self) -> None:
        if self.precision not in ("full", "int8"):
            raise ValueError(f"`precision` must be 'full' or 'int8', got {self.precision!r}")
        if not self.sharpness > 0:
            raise ValueError(f"`sharpness` must be > 0, got {self.sharpness}")

    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        queries = mean_tiles(q, grid.block_size[0], memory_budget // 4, scale * self.sharpness)
        on_gpu = q.is_cuda and grid.kv_blocks and find_spec("triton") is not None
        if self.precision == "int8":
            center = center_of(k)
            if on_gpu:
                from dynaxx.kernels.triton.int8_scores import int8_scores, quantised_keys

                keys = quantised_keys(k, center, grid.block_size[1])
                return lambda start, stop: int8_scores(queries.vectors(start, stop), keys, start, grid)
            return lambda start, stop: int8_scores_by_torch(
                queries.vectors(start, stop), k, center, start, grid, memory_budget // 2
            )
        if on_gpu:
            from dynaxx.kernels.triton.query_scores import query_scores

            return lambda start, stop: query_scores(queries.vectors(start, stop).to(k.dtype), k, start, grid)
        return lambda start, stop: _scores(queries.vectors(start, stop), k, start, grid, memory_budget // 2)


PIECE_BYTES = 4 << 20  # of logits at a time: what a core's cache holds
SMALLEST = -80.0  # beside a best of 0: nothing in fp32, but its exp is no denormal, which costs a CPU 50 times as much


def _scores(queries: Tensor, k: Tensor, start: int, grid: BlockGrid, memory_budget: int) -> Tensor:
    """(B, Hq, R, D) mean queries of the rows from `start`, times the softmax scale -> (B, Hq, R, C)."""
    (batch, heads, rows, dim), (q_block, kv_block) = queries.shape, grid.block_size
    scores = queries.new_full((batch, heads, rows, grid.kv_blocks), -torch.inf)
    ends = torch.full((rows,), grid.seqlen_k, device=k.device)  # past the last key that each row sees
    if grid.causal:
        ends = (torch.arange(start + 1, start + rows + 1, device=k.device) * q_block + grid.offset).clamp(
            max=grid.seqlen_k
        )
    position = torch.arange(grid.kv_blocks * kv_block, device=k.device)
    block_bytes = 4 * batch * kv_block * (2 * k.shape[2] * dim + 2 * heads * rows)
    for first, last in pieces(grid.kv_blocks, block_bytes, min(memory_budget, PIECE_BYTES)):
        begin, stop = first * kv_block, last * kv_block
        above, inside = (
            int((ends <= edge).sum()) for edge in (begin, stop - 1)
        )  # rows that see nothing, not all of it
        keys = k[:, begin:stop].float().permute(0, 2, 3, 1)
        if keys.shape[-1] < stop - begin:
            keys = torch.nn.functional.pad(keys, (0, stop - begin - keys.shape[-1]))
        logits = per_kv_head(queries[:, :, above:], keys)
        hidden = position[begin:stop] >= ends[above:inside, None]
        logits[:, :, : inside - above].masked_fill_(hidden, -torch.inf)
        logits = logits.unflatten(-1, (-1, kv_block))  # (B, Hq, R, blocks, kv_block)
        best = logits.amax(-1, keepdim=True)
        logits.sub_(best.clamp(min=torch.finfo(logits.dtype).min)).clamp_(min=SMALLEST)
        scores[:, :, above:, first:last] = logits.exp_().sum(-1).log_().add_(best[..., 0])
    return scores
