"""Choosing on a GPU: the same choice as on the CPU, put together there, with no read back to the host.

Scores come a piece of rows at a time from the scorer; the kernels of `kernels.triton.select` turn them into bits and
counts, and those into a layout. Its tensors are as large as the rule can make them at most, which is known beforehand.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid, BlockLayout
from dynaxx.layout.making import running_sum
from dynaxx.patterns.base import Pattern
from dynaxx.selection.groups import heads_alike
from dynaxx.selection.scorers.base import pieces
from dynaxx.selection.static import static_part

if TYPE_CHECKING:
    from dynaxx.kernels.triton.select import ChoiceRule, StaticEntries
    from dynaxx.selection.base import Selector

BYTES_PER_SCORE = 12  # scores, their product and its contiguous copy, fp32 each
MAX_COLUMNS = 1 << 14  # as the kernels': a row of scores stays in registers
MAX_ENTRIES = 2**31 - 1  # offsets of a layout are int32


def serves(q: Tensor, grid: BlockGrid, selector: Selector) -> bool:
    """Whether the kernels make this choice; else torch does, on any device."""
    return (
        q.is_cuda
        and selector.choice(q.shape[2]) is not None
        and 0 < grid.kv_blocks <= MAX_COLUMNS
        and grid.q_blocks > 0
        and importlib.util.find_spec("triton") is not None
    )


def select_on_device(
    q: Tensor, k: Tensor, pattern: Pattern | None, selector: Selector, grid: BlockGrid, scale: float, memory_budget: int
) -> BlockLayout:
    """As `select_blocks`, for what `serves` accepts."""
    from dynaxx.kernels.triton.select import choose_rows, emit_entries

    batch, q_heads = q.shape[0], q.shape[2]
    static, rule = _static_entries(pattern, grid, q.device), _rule(selector, q_heads, q.device)
    capacity = batch * _most_entries(pattern, selector, grid, q_heads)
    if capacity > MAX_ENTRIES:
        raise ValueError(
            f"`rule` may visit {capacity} blocks, more than a layout of int32 offsets holds; "
            "use larger blocks, a smaller budget, or fewer heads or batch entries at a time"
        )
    score_rows = selector.scorer.prepare(q, k, grid, scale, memory_budget=max(1, memory_budget // 2))
    alike = heads_alike(selector, q_heads, k.shape[2])
    serves_heads = 1 if rule.amounts.numel() > 1 else alike
    shape = (batch, q_heads // serves_heads, grid.q_blocks)
    bits = torch.empty(*shape, -(-grid.kv_blocks // 32), dtype=torch.int32, device=q.device)
    counts = torch.empty(batch, q_heads, 1 + grid.q_blocks, dtype=torch.int32, device=q.device)
    partial = torch.empty(batch, q_heads, grid.q_blocks, dtype=torch.int32, device=q.device)
    row_bytes = BYTES_PER_SCORE * batch * q_heads * grid.kv_blocks
    for start, stop in pieces(grid.q_blocks, row_bytes, max(1, memory_budget // 2)):
        choose_rows(score_rows(start, stop).float(), start, grid, rule, alike, static, bits, counts, partial)
    kv_indptr = running_sum(counts)
    kv_indices, kv_masks = emit_entries(bits, kv_indptr, grid, static, capacity)
    return BlockLayout(
        seqlen_q=grid.seqlen_q,
        seqlen_k=grid.seqlen_k,
        block_size=grid.block_size,
        kv_indptr=kv_indptr,
        kv_num_partial=partial,
        kv_indices=kv_indices,
        kv_masks=kv_masks,
        masks=static.masks,
    )


@lru_cache(maxsize=64)
def _static_entries(pattern: Pattern | None, grid: BlockGrid, device: torch.device) -> StaticEntries:
    from dynaxx.kernels.triton.select import StaticEntries

    part = static_part(pattern, grid)
    layout = None if part.layout is None else part.layout.to(device)
    return StaticEntries(
        layout, part.codes.int().to(device), part.same_as_causal.int().to(device), part.masks.to(device)
    )


@lru_cache(maxsize=64)
def _rule(selector: Selector, q_heads: int, device: torch.device) -> ChoiceRule:
    from dynaxx.kernels.triton.select import ChoiceRule

    choice = selector.choice(q_heads)
    assert choice is not None, "`serves` asked before"
    amounts = torch.tensor(choice.amounts, dtype=torch.float32, device=device)
    return ChoiceRule(choice.mode, amounts, choice.shares, choice.floor)


@lru_cache(maxsize=256)
def _most_entries(pattern: Pattern | None, selector: Selector, grid: BlockGrid, q_heads: int) -> int:
    """Blocks that a batch entry can visit at most."""
    choice, part = selector.choice(q_heads), static_part(pattern, grid)
    assert choice is not None, "`serves` asked before"
    visible = grid.causal_kv_blocks(grid.rows())
    if choice.mode != "top_k":
        return int(visible.sum()) * q_heads
    total = 0
    for amount in choice.amounts:
        seen = visible.clamp(min=choice.floor)
        budget = (seen * amount).ceil().long() if choice.shares else torch.full_like(seen, int(amount))
        total += int(torch.minimum(visible, part.counts + budget).sum())
    return total * (q_heads // len(choice.amounts))
