# SPDX-License-Identifier: Apache-2.0
"""Patterns and selectors with the sequence split over ranks: they choose the same blocks as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.distributed.gather import GatherRuns, Run, WholeGathering, query_runs, reaches
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.plan import check_stages
from dynaxx.distributed.sharded import ShardedLayout, rows_of
from dynaxx.distributed.split import SequenceSplit
from dynaxx.distributed.summaries import has_summaries, with_summaries
from dynaxx.errors import UnsupportedInputError
from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.entries import joined_entries
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.runs import Visited
from dynaxx.policy.specs import budget_of, for_heads, parts
from dynaxx.selection import Hybrid, MeanPool, MeanQuery, MinMax, Selector, Threshold, TopK, TopP, select_blocks

Rule = Pattern | Selector | Hybrid


@typed
@dataclass(frozen=True)
class RowsOf(Pattern):
    """Some rows of a pattern on a longer grid, as a pattern for these rows alone.

    Args:
        pattern: pattern of the whole sequence.
        seqlen: length of the whole sequence.
        first: position of the first query, a multiple of the q block.
    """

    pattern: Pattern
    seqlen: int
    first: int

    @override
    def layout(
        self,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        causal: bool = True,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> BlockLayout:
        whole = self.pattern.layout(self.seqlen, self.seqlen, causal=causal, block_size=block_size)
        first = self.first // whole.block_size[0]
        rows = rows_of(whole, torch.arange(first, first + -(-seqlen_q // whole.block_size[0]), device="cpu"), seqlen_q)
        return replace(rows, seqlen_k=self.seqlen if seqlen_k is None else seqlen_k).to(device)

    @override
    def visible(self, grid: BlockGrid, q_pos: Any, k_pos: Any) -> Any:
        raise NotImplementedError("`RowsOf` has only a layout")

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        raise NotImplementedError("`RowsOf` has only a layout")


@typed
@torch.no_grad()
def select_split_blocks(
    q: Tensor,
    k: Tensor,
    rule: Rule,
    split: SequenceSplit,
    mesh: Mesh,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 64,
    scale: float | None = None,
    memory_budget: int | None = None,
) -> ShardedLayout:
    """Select blocks for this rank's queries among the keys of all ranks: the same blocks as on one device.

    `MeanPool` and `MinMax` with one summary per block gather these summaries; other scorers gather the keys. All ranks
    of the mesh must call this function.

    Args:
        q: (batch, own tokens, q_heads, head_dim).
        k: (batch, own tokens, kv_heads, head_dim).
        rule: a pattern, a selector or a hybrid, as for `dynaxx.select_blocks`.
        split: which rank owns which tokens.
        mesh: the ranks, as for `sparse_attention`.
        causal: hide keys after the query.
        block_size: tokens per block, one number or (q_block, kv_block).
        scale: softmax scale, default head_dim ** -0.5.
        memory_budget: bytes for temporary tensors, as for `dynaxx.select_blocks`.

    Returns:
        This rank's rows, for `sparse_attention`.

    Raises:
        ValueError, TypeError: like `dynaxx.select_blocks`.
        UnsupportedInputError: the scorer reads queries of other ranks.
    """
    group = group_of(mesh)
    rank, sizes = dist.get_rank(group), as_block_size(block_size)
    if isinstance(rule, Pattern):
        layout = rule.layout(split.seqlen, split.seqlen, causal=causal, block_size=sizes, device=q.device)
        return ShardedLayout.of(layout, split, rank)
    check_rule(rule, split, sizes)
    options: dict[str, Any] = {"causal": causal, "block_size": sizes, "scale": scale, "memory_budget": memory_budget}
    selector = rule.selector if isinstance(rule, Hybrid) else rule
    own_rule: Selector | Hybrid = rule
    if has_summaries(selector):
        own_rule, keys = with_summaries(rule, k, split, rank, group, sizes[1])
    else:
        (keys,) = WholeGathering((k,), split, rank, group, reaches(split, causal)).wait()
    layouts = [
        select_blocks(q[:, run.first : run.last], keys[:, : run.keys], rule_of_run(own_rule, run, split), **options)
        for run in query_runs(split, rank, causal)
    ]
    return ShardedLayout(_stacked_rows(layouts, split, rank), split, split, rank)


def staged_runs(
    k: Tensor, v: Tensor, runs: list[Run], split: SequenceSplit, mesh: Mesh, stages: int
) -> Iterator[tuple[slice, list[tuple[Tensor, Tensor]]]]:
    """Yield for each stage its kv heads, and the keys and values that each causal run may see.

    The exchange of the next stage runs while the caller processes a stage.

    Raises:
        ValueError: `stages` does not divide the number of kv heads.
    """
    group = group_of(mesh)
    rank, kv_heads = dist.get_rank(group), k.shape[2]
    check_stages(stages, kv_heads)
    step = kv_heads // stages
    parts = lambda i: (k[:, :, i : i + step], v[:, :, i : i + step])
    start = lambda i: WholeGathering(parts(i), split, rank, group, reaches(split))
    gathering = start(0)
    for first in range(0, kv_heads, step):
        current = gathering
        if first + step < kv_heads:
            gathering = start(first + step)
        some = slice(first, first + step)
        seen = GatherRuns.apply(k[:, :, some], v[:, :, some], current, runs, split, rank, group)
        yield some, list(zip(seen[::2], seen[1::2], strict=True))


def check_rule(rule: Rule, split: SequenceSplit, sizes: tuple[int, int]) -> None:
    """Reject a rule if its choice for a row depends on rows of other ranks or on later keys.

    Raises:
        TypeError: `rule` is neither a selector nor a hybrid.
        UnsupportedInputError: the rule depends on other rows.
    """
    if not isinstance(rule, Selector | Hybrid):
        raise TypeError(f"`rule` must be a selector or pattern | selector, got {type(rule).__name__}")
    for size in sizes:
        split.check_block(size)
    if not chooses_row_by_row(rule):
        raise UnsupportedInputError(
            f"a selection by {rule!r} with the sequence split over ranks",
            {
                "distributed": [
                    "only a selection that is made row by row is equal on every rank: use TopK, TopP or Threshold with "
                    "MeanQuery(), MeanPool() or MinMax(), or split the heads instead (sparse_attention_by_heads)"
                ]
            },
        )


def chooses_row_by_row(rule: Rule) -> bool:
    """Return whether a rule's choice for a row of blocks depends on that row alone, so that ranks can choose apart."""
    selector = rule.selector if isinstance(rule, Hybrid) else rule
    if not isinstance(selector, TopK | TopP | Threshold):
        return False
    return isinstance(selector.scorer, MeanPool | MinMax | MeanQuery)


def rule_of_run(rule: Selector | Hybrid, run: Run, split: SequenceSplit) -> Selector | Hybrid:
    """Return the rule restricted to the rows of one run."""
    if isinstance(rule, Selector):
        return rule
    return Hybrid(RowsOf(rule.pattern, split.seqlen, run.position), rule.selector)


def rule_of_heads(rule: Any, heads: slice, q_heads: int) -> Any:
    """Return the rule restricted to some q heads, with the budgets of these heads.

    Raises:
        ValueError: the rule has budgets for another number of heads.
    """
    selector = parts(rule)[1]
    budget = None if selector is None else budget_of(selector)
    if selector is not None and isinstance(budget, tuple) and len(budget) != q_heads:
        raise ValueError(
            f"`{selector.budget_field}` must be one value or one per q head ({q_heads}), got {len(budget)}"
        )
    return for_heads(rule, range(heads.start, heads.stop))


def _stacked_rows(layouts: list[BlockLayout], split: SequenceSplit, rank: int) -> BlockLayout:
    """Concatenate the rows of several layouts into one layout over the whole sequence."""
    first, tokens = layouts[0], split.length(rank)
    grid = BlockGrid(tokens, split.seqlen, first.block_size, causal=False)
    starts = [0, *accumulate(layout.q_blocks for layout in layouts)]

    def map_rows(index: int, flat_rows: Tensor) -> Tensor:
        q_blocks = max(1, layouts[index].q_blocks)
        return flat_rows // q_blocks * grid.q_blocks + flat_rows % q_blocks + starts[index]

    joined = joined_entries(layouts, map_rows)
    return BlockLayout.from_entries(grid, *joined, layout_batch=first.layout_batch, layout_heads=first.layout_heads)
