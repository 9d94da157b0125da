# SPDX-License-Identifier: Apache-2.0
"""Choose blocks on a GPU without reading anything back to the host. The choice equals that on a CPU.

The scorer returns scores for a few rows at a time. The kernels of `kernels.selection.triton` turn them into bits and
counts, and these into a layout. The layout's tensors are allocated for the largest choice that the rule can make.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.registry import SELECTION
from dynaxx.kernels.scale import softmax_scale
from dynaxx.kernels.selection.contract import SelectionProblem
from dynaxx.layout import BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.form import Form, form_of
from dynaxx.layout.host import moved_together
from dynaxx.layout.host_metadata import set_form
from dynaxx.layout.paging import SequenceKeys
from dynaxx.patterns.base import Pattern
from dynaxx.selection.choice import Choice, count_heads_per_choice
from dynaxx.selection.scorers.base import GPU_MEMORY_BUDGET, Scorer, pieces
from dynaxx.selection.static import static_part

if TYPE_CHECKING:
    from dynaxx.kernels.selection.triton.row import StaticEntries
    from dynaxx.kernels.selection.triton.select import ChoiceRule

BYTES_PER_SCORE = 12  # scores, their product and its contiguous copy, each fp32
MAX_ENTRIES = 2**31 - 1  # offsets of a layout are int32


def selection_problem(q: Tensor, grid: BlockGrid, selector: Choice) -> SelectionProblem:
    """Describe the choice, so that the kernels can say whether they serve it. Otherwise torch makes the choice."""
    by_amount = selector.choice(q.shape[2]) is not None
    return SelectionProblem(q.device, grid.q_blocks, grid.kv_blocks, repr(selector), by_amount)


def serves(q: Tensor, grid: BlockGrid, selector: Choice) -> bool:
    """Return whether the kernels can make this choice."""
    return q.is_cuda and not SELECTION.reasons("triton", selection_problem(q, grid, selector))


class SelectionInputs(NamedTuple):
    """The inputs of a choice besides q and k, for `record_or_replay`. Recorded launches serve any budget."""

    scorer: Scorer
    heads_per_choice: int  # number of neighbouring heads that choose together
    grid: BlockGrid
    rule: ChoiceRule
    static: StaticEntries
    form: Form
    kernel_inputs: tuple[Tensor, ...]

    def is_recorded(self, q: Tensor, memory_budget: int) -> bool:
        """Return whether a choice may be recorded; a recording keeps the scores of all rows in memory at once."""
        grid = self.grid
        return BYTES_PER_SCORE * q.shape[0] * q.shape[2] * grid.kv_blocks * grid.q_blocks <= memory_budget // 2


def serves_in_place(q: Tensor, keys: SequenceKeys, selector: Choice, block_size: tuple[int, int]) -> bool:
    """Return whether the kernels can make this choice among keys that stay in the pages of a cache."""
    grid = BlockGrid(q.shape[1], keys.seqlen_k, block_size, causal=True)
    return selector.scorer.reads_places and serves(q, grid, selector)


def select_in_place(
    q: Tensor,
    keys: SequenceKeys,
    pattern: Pattern | None,
    selector: Choice,
    block_size: tuple[int, int],
    scale: float | None,
    memory_budget: int = GPU_MEMORY_BUDGET,
) -> BlockLayout:
    """Choose blocks of a causal sequence as `select_blocks` does. `serves_in_place` must have accepted the inputs."""
    grid = BlockGrid(q.shape[1], keys.seqlen_k, block_size, causal=True)
    scale = softmax_scale(scale, q.shape[3])
    return select_on_device(q, keys.k, pattern, selector, grid, scale, memory_budget, keys.places)


def select_on_device(
    q: Tensor,
    k: Tensor,
    pattern: Pattern | None,
    selector: Choice,
    grid: BlockGrid,
    scale: float,
    memory_budget: int,
    places: Tensor | None = None,
) -> BlockLayout:
    """Choose blocks as `select_blocks` does. `serves` must have accepted the inputs."""
    from dynaxx.kernels.runtime.launch_cache import record_or_replay

    given, capacity = selection_inputs(pattern, selector, grid, q, k)
    if given.is_recorded(q, memory_budget):
        entries = record_or_replay(_select, given, (q, k, places), scale, memory_budget, capacity)
    else:
        entries = _select(given, q, k, places, scale, memory_budget, capacity)
    return _layout(given, capacity, q, entries, places)


def selection_inputs(
    pattern: Pattern | None, selector: Choice, grid: BlockGrid, q: Tensor, k: Tensor
) -> tuple[SelectionInputs, int]:
    """Return the inputs of a choice besides q and k, and the largest number of blocks that it may visit.

    Raises:
        ValueError: a layout cannot hold as many blocks.
    """
    batch, q_heads = q.shape[0], q.shape[2]
    capacity = batch * most_entries(pattern, selector, grid, q_heads)
    if capacity > MAX_ENTRIES:
        raise ValueError(
            f"`rule` may visit {capacity} blocks, more than a layout of int32 offsets holds; "
            "use larger blocks, a smaller budget, or fewer heads or batch entries at a time"
        )
    return _given(pattern, selector, grid, q_heads, k.shape[2], q.device), capacity


def select_within(
    given: SelectionInputs, q: Tensor, k: Tensor, scale: float, memory_budget: int, capacity: int
) -> BlockLayout:
    """Choose blocks as a part of a call that is recorded as a whole."""
    return _layout(given, capacity, q, _select(given, q, k, None, scale, memory_budget, capacity), None)


def _layout(
    given: SelectionInputs, capacity: int, q: Tensor, entries: tuple[Tensor, ...], places: Tensor | None
) -> BlockLayout:
    """Return the result of `_select` as a layout."""
    grid, (kv_indptr, partials, kv_indices, kv_masks, *placed) = given.grid, entries
    layout = BlockLayout(
        seqlen_q=grid.seqlen_q,
        seqlen_k=grid.seqlen_k,
        block_size=grid.block_size,
        kv_indptr=kv_indptr,
        kv_num_partial=partials,
        kv_indices=kv_indices,
        kv_masks=kv_masks,
        masks=given.static.masks,
    )
    if places is not None:
        layout.derived.placed = (places, placed[0])
    return set_form(layout, form_of((), given.form, q.shape[0], q.shape[2], capacity))


def _select(
    given: SelectionInputs,
    q: Tensor,
    k: Tensor,
    places: Tensor | None,
    scale: float,
    memory_budget: int,
    capacity: int,
) -> tuple[Tensor, ...]:
    """Return kv_indptr, kv_num_partial, kv_indices and kv_masks of the chosen blocks, and where blocks in pages are."""
    from dynaxx.kernels.selection.triton.entries import emit_entries, running_sum

    bits, counts, partials = _choose(given, q, k, places, scale, memory_budget)
    kv_indptr = running_sum(counts)
    kv_indices, kv_masks = (torch.empty(capacity, dtype=torch.int32, device=q.device) for _ in range(2))
    placed = emit_entries(bits, kv_indptr, given.grid, given.static, (kv_indices, kv_masks), places)
    found = (kv_indptr, partials, kv_indices, kv_masks)
    return found if placed is None else (*found, placed)


def _choose(
    given: SelectionInputs, q: Tensor, k: Tensor, places: Tensor | None, scale: float, memory_budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bits, counts and partial counts that `choose_rows` writes, for all rows."""
    from dynaxx.kernels.selection.triton.select import choose_rows

    grid, rule = given.grid, given.rule
    batch, q_heads = q.shape[0], q.shape[2]
    most = max(1, memory_budget // 2)
    if places is None:
        score_rows = given.scorer.prepare(q, k, grid, scale, memory_budget=most)
    else:
        score_rows = given.scorer.prepare_in_place(q, k, places, grid, scale, memory_budget=most)
    heads_per_row = 1 if rule.amounts.numel() > 1 else given.heads_per_choice
    shape = (batch, q_heads // heads_per_row, grid.q_blocks)
    bits = torch.empty(*shape, -(-grid.kv_blocks // 32), dtype=torch.int32, device=q.device)
    counts = torch.empty(batch, q_heads, 1 + grid.q_blocks, dtype=torch.int32, device=q.device)
    partials = torch.empty(batch, q_heads, grid.q_blocks, dtype=torch.int32, device=q.device)
    row_bytes = BYTES_PER_SCORE * batch * q_heads * grid.kv_blocks
    for start, stop in pieces(grid.q_blocks, row_bytes, most):
        scores = score_rows(start, stop).float()
        choose_rows(scores, start, grid, rule, given.heads_per_choice, given.static, bits, counts, partials)
    return bits, counts, partials


@lru_cache(maxsize=256)
def _given(
    pattern: Pattern | None, selector: Choice, grid: BlockGrid, q_heads: int, kv_heads: int, device: torch.device
) -> SelectionInputs:
    from dynaxx.kernels.selection.triton.select import ChoiceRule

    static, choice = _static_entries(pattern, grid, device), selector.choice(q_heads)
    assert choice is not None, "`serves` asked before"
    amounts = _amounts(choice.amounts, device)
    rule = ChoiceRule(choice.mode, amounts, choice.shares, choice.floor)
    heads_per_choice = count_heads_per_choice(selector, q_heads, kv_heads)
    kind = choice.mode, choice.shares, choice.floor, len(choice.amounts) > 1
    form = form_of((), device, pattern, selector.scorer, *kind, heads_per_choice, grid)
    of_pattern = () if static.layout is None else (static.mask_ids, static.layout.kv_indptr, static.layout.kv_indices)
    tensors = (amounts, static.same_as_causal, *of_pattern, static.masks.bits, static.masks.bands)
    return SelectionInputs(selector.scorer, heads_per_choice, grid, rule, static, form, tensors)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # layouts for training share the masks
def _static_entries(pattern: Pattern | None, grid: BlockGrid, device: torch.device) -> StaticEntries:
    from dynaxx.kernels.selection.triton.row import StaticEntries

    part = static_part(pattern, grid)
    layout = None if part.layout is None else part.layout.to(device)
    numbers = part.mask_ids.int(), part.same_as_causal.int(), part.masks.bits, part.masks.bands
    mask_ids, same, bits, bands = moved_together(numbers, device)  # every new length waits for the GPU otherwise
    return StaticEntries(layout, mask_ids, same, ElementMasks(bits, bands, part.masks.kv_block))


@LayoutCache
def _amounts(amounts: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(amounts, dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def most_entries(pattern: Pattern | None, selector: Choice, grid: BlockGrid, q_heads: int) -> int:
    """Return the largest number of blocks that a batch entry can visit."""
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
