"""`Selector`: a rule over data that gives a `BlockLayout`; alone, or beside a pattern as a `Hybrid`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dynaxx.layout import EMPTY, FULL, BlockGrid, BlockLayout, ElementMasks, as_block_size
from dynaxx.layout.convert import block_codes
from dynaxx.layout.masks import causal_codes, causal_masks
from dynaxx.patterns.base import Pattern

if TYPE_CHECKING:
    from dynaxx.selection.scorers import Scorer

SCORE_BYTES = 64 << 20  # scores of so many bytes exist at once


class Selector(ABC):
    """A data-dependent choice of blocks per q head. Hashable and immutable; `pattern | selector` is a `Hybrid`."""

    scorer: Scorer

    @abstractmethod
    def choose(self, scores: Tensor, optional: Tensor, visible: Tensor) -> Tensor:
        """Choose blocks.

        Args:
            scores: (B, Hq, R, C) fp32 logits, -inf for blocks no query of the row may see.
            optional: (..., R, C) bool, the blocks to choose from; the other visible ones are visited anyway.
            visible: (R,) int64, how many blocks each row may see.

        Returns:
            (B, Hq, R, C) bool, a subset of `optional`.
        """

    def select(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = True,
        block_size: int | tuple[int, int] = 64,
        scale: float | None = None,
    ) -> BlockLayout:
        """Choose kv blocks for every q block. See `select_blocks`."""
        return _select(q, k, None, self, causal, block_size, scale)

    def __ror__(self, pattern: object) -> Hybrid:
        return Hybrid(pattern, self) if isinstance(pattern, Pattern) else NotImplemented


@dataclass(frozen=True)
class Hybrid:
    """A pattern that is always visible, and a selector that spends its budget on the rest."""

    pattern: Pattern
    selector: Selector

    def select(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = True,
        block_size: int | tuple[int, int] = 64,
        scale: float | None = None,
    ) -> BlockLayout:
        """Choose kv blocks beside the pattern's. See `select_blocks`."""
        return _select(q, k, self.pattern, self.selector, causal, block_size, scale)

    @property
    def needs_tokens(self) -> bool:
        """As `Pattern.needs_tokens`."""
        return self.pattern.needs_tokens

    def resolve(self, input_ids: Tensor | Sequence[int]) -> Hybrid:
        """This rule for one request; as `Pattern.resolve`."""
        return Hybrid(self.pattern.resolve(input_ids), self.selector)

    def __repr__(self) -> str:
        return f"{self.pattern!r} | {self.selector!r}"


@torch.no_grad()
def select_blocks(
    q: Tensor,
    k: Tensor,
    rule: Pattern | Selector | Hybrid,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 64,
    scale: float | None = None,
) -> BlockLayout:
    """Make the layout that a pattern, a selector, or both say for these queries and keys.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim); q_heads must be a multiple of kv_heads.
        rule: for a pattern alone the data does not matter and the layout is shared.
        causal: hide keys after the query.
        block_size: tokens per block, or (q_block, kv_block).
        scale: softmax scale, default head_dim ** -0.5; estimates of attention mass depend on it.

    Returns:
        A layout per batch entry and q head. No gradient flows through a choice.

    Raises:
        ValueError: shapes that do not fit, or a per-head budget for another number of heads.
    """
    if isinstance(rule, Pattern):
        return rule.layout(q.shape[1], k.shape[1], causal=causal, block_size=block_size, device=q.device)
    return rule.select(q, k, causal=causal, block_size=block_size, scale=scale)


@torch.no_grad()
def _select(
    q: Tensor,
    k: Tensor,
    pattern: Pattern | None,
    selector: Selector,
    causal: bool,
    block_size: int | tuple[int, int],
    scale: float | None,
) -> BlockLayout:
    grid = _checked_grid(q, k, as_block_size(block_size), causal)
    batch, _, heads, head_dim = q.shape
    forced = _forced(pattern, grid, q.device)
    score_rows = selector.scorer.prepare(q, k, grid, head_dim**-0.5 if scale is None else scale)
    at_once = max(1, SCORE_BYTES // (4 * max(1, batch * heads * grid.kv_blocks)))
    cols = torch.arange(grid.kv_blocks, device=q.device)
    leads, columns, codes = [cols[:0]], [cols[:0]], [cols[:0]]
    for start in range(0, grid.q_blocks if grid.kv_blocks else 0, at_once):
        rows = torch.arange(start, min(start + at_once, grid.q_blocks), device=q.device)
        causal_code = causal_codes(grid, rows[:, None], cols)
        own = forced.codes[rows]
        covered = (own == FULL) | ((own >= 0) & (forced.same_as_causal[own.clamp(min=0)] == causal_code))
        scores = score_rows(start, start + len(rows)).masked_fill(causal_code == EMPTY, -torch.inf)
        chosen = selector.choose(scores, (causal_code != EMPTY) & ~covered, grid.causal_kv_blocks(rows))
        code = torch.where(chosen, causal_code, own)
        b, h, r, col = (code != EMPTY).nonzero(as_tuple=True)
        leads.append((b * heads + h) * grid.q_blocks + r + start)
        columns.append(col)
        codes.append(code[b, h, r, col])
    return BlockLayout.from_entries(
        grid,
        torch.cat(leads),
        torch.cat(columns),
        torch.cat(codes),
        forced.masks,
        layout_batch=batch,
        layout_heads=heads,
    )


def _checked_grid(q: Tensor, k: Tensor, block_size: tuple[int, int], causal: bool) -> BlockGrid:
    for name, tensor in (("q", q), ("k", k)):
        if tensor.ndim != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"`{name}` must be (batch, seqlen, heads, head_dim) of floats, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            "`q` and `k` must agree in batch and head_dim, q_heads a multiple of kv_heads, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    return BlockGrid(q.shape[1], k.shape[1], block_size, causal)


class _Forced(NamedTuple):
    """What a pattern shows of each block, beside the causal masks."""

    codes: Tensor  # (q_blocks | 1, kv_blocks) int64 code of each block in `masks`, EMPTY where the pattern has nothing
    same_as_causal: Tensor  # (len(masks) | 1,) int64: for a mask, the causal mask that equals it, else EMPTY
    masks: ElementMasks  # the causal masks, then the pattern's


def _forced(pattern: Pattern | None, grid: BlockGrid, device: torch.device) -> _Forced:
    causal = causal_masks(grid).to(device)
    if pattern is None:
        nothing = torch.full((1, grid.kv_blocks), EMPTY, device=device)
        return _Forced(nothing.expand(grid.q_blocks, -1), nothing.new_full((1,), EMPTY), causal)
    static = pattern.layout(grid.seqlen_q, grid.seqlen_k, causal=grid.causal, block_size=grid.block_size, device=device)
    codes, masks = block_codes(static)[0, 0], causal.append(static.masks)
    equal = (masks.bits[:, None] == causal.bits[None]).flatten(2).all(-1)  # (masks, causal masks)
    same = torch.full((max(1, len(masks)),), EMPTY, device=device)
    which, twin = equal.nonzero(as_tuple=True)
    same[which] = twin
    return _Forced(torch.where(codes >= 0, codes + len(causal), codes), same, masks)
