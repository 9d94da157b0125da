# SPDX-License-Identifier: Apache-2.0
"""Budgets: keep a number of the scored blocks, a share of them, or a share of the attention mass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout.host import never_traced
from dynaxx.selection.base import Selector
from dynaxx.selection.choice import ChoiceSettings, Per
from dynaxx.selection.scorers import MeanQuery, Scorer
from dynaxx.settings import Count, NotNegative, Range, Share

MAX_BLOCKS = 2**31 - 1  # more than a row of blocks can have
Blocks = Annotated[int, Range(0, tries=(0, 1, 2, 4))]


@never_traced
def default_scorer() -> Scorer:
    """Return the scorer with the best recall for its cost, see docs/guides/selection.md."""
    return MeanQuery()


@dataclass(frozen=True)
class TopK(Selector, kind="top_k"):
    """The best blocks of every q block: `TopK(3)` keeps 3, `TopK(0.1)` 10 % of the visible ones.

    Args:
        budget: an int is a number of blocks, a float a share of the causally visible blocks (rounded up). In a hybrid
            the blocks of the pattern do not count. A tuple has one value per q head.
        scorer: the scorer that ranks the blocks.
        floor: q blocks that see fewer than `floor` kv blocks get the share of `floor` blocks. Early tokens need about
            as many blocks as late ones, and cost little.
        per: with "group" the q heads of a kv head choose together, by the sum of each head's mass for a block relative
            to its best block; with "head" each q head chooses alone.
    """

    budget: Blocks | Share | tuple[Blocks | Share, ...]
    scorer: Scorer = field(default_factory=default_scorer)
    floor: Count = 0
    per: Per = "group"
    only_ranks: ClassVar[bool] = True
    budget_field: ClassVar[str] = "budget"

    @override
    def choice(self, q_heads: int) -> ChoiceSettings | None:
        budgets = _checked_heads("budget", _per_head(self.budget), q_heads)
        kinds = {isinstance(budget, float) for budget in budgets}
        amounts = tuple(min(budget, MAX_BLOCKS) for budget in budgets)
        return ChoiceSettings("top_k", amounts, kinds == {True}, self._floor()) if len(kinds) == 1 else None

    def _floor(self) -> int:
        return min(self.floor, MAX_BLOCKS)

    @override
    def choose(self, scores: Tensor, optional: Tensor, visible: Tensor) -> Tensor:
        budgets = _checked_heads("budget", _per_head(self.budget), scores.shape[1])
        least = visible.clamp(min=self._floor())
        counts = torch.stack([_count(budget, least) for budget in budgets])[..., None]  # (Hq | 1, R, 1)
        # The same for every piece of rows, so that ties break independently of how the rows are split.
        columns = scores.shape[-1]
        most = min(
            columns,
            max(
                int(_count(budget, torch.tensor(max(columns, self._floor()), dtype=torch.int64, device="cpu")))
                for budget in budgets
            ),
        )
        if most == 0:
            return torch.zeros_like(scores, dtype=torch.bool)
        hidden = scores.masked_fill(~optional, -torch.inf)
        best, where = hidden.topk(most, dim=-1)
        kept = (torch.arange(most, device=scores.device) < counts) & (best > -torch.inf)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, where, kept)
        return chosen | ((counts >= visible[:, None]) & optional)  # a full budget also keeps blocks that score -inf


@dataclass(frozen=True)
class TopP(Selector, kind="top_p"):
    """The best blocks of every q block until their estimated attention mass reaches the share `mass`.

    Args:
        mass: share to reach, 0.0 to 1.0, including the mass of a hybrid's pattern; a tuple has one value per q head.
        scorer: the scorer that estimates the mass.
        per: with "group" the q heads of a kv head choose together, by the sum of their masses; with "head" each q head
            chooses alone.
    """

    mass: Share | tuple[Share, ...]
    scorer: Scorer = field(default_factory=default_scorer)
    per: Per = "group"
    budget_field: ClassVar[str] = "mass"

    @override
    def choice(self, q_heads: int) -> ChoiceSettings:
        return ChoiceSettings("top_p", _checked_heads("mass", _per_head(self.mass), q_heads))

    @override
    def choose(self, scores: Tensor, optional: Tensor, visible: Tensor) -> Tensor:
        goals = _checked_heads("mass", _per_head(self.mass), scores.shape[1])
        goal = torch.tensor(goals, device=scores.device, dtype=torch.float32)[:, None, None]
        share = scores.softmax(-1).nan_to_num(0.0)
        best, where = share.masked_fill(~optional, -1.0).sort(dim=-1, descending=True)
        covered = share.masked_fill(optional, 0.0).sum(-1, keepdim=True)
        before = covered + best.clamp(min=0).cumsum(-1) - best  # mass of all blocks that rank before each block
        kept = ((before < goal) | (goal >= 1)) & (best >= 0)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, where, kept)


@dataclass(frozen=True)
class Threshold(Selector, kind="threshold"):
    """The blocks with at least `share` of the mass of the row's best block, or of an even spread; without sorting.

    One pass finds the reference mass of a row and another compares with it (FlashPrefill). Nothing is sorted, so the
    choice costs O(blocks).

    Args:
        share: the share of the reference mass that a block must have. 0.0 keeps every visible block; a threshold above
            the row's largest mass keeps none. A tuple has one value per q head.
        of: the reference mass. "max" is the largest mass of a block in the row, blocks of a hybrid's pattern included;
            "uniform" is the mass of a block if the row's mass were spread evenly over its visible blocks.
        scorer: the scorer that estimates the mass.
        per: with "group" the q heads of a kv head choose together, by the sum of their masses; with "head" each q head
            chooses alone.
    """

    share: NotNegative | tuple[NotNegative, ...]
    of: Literal["max", "uniform"] = "max"
    scorer: Scorer = field(default_factory=default_scorer)
    per: Per = "group"
    budget_field: ClassVar[str] = "share"
    nothing: ClassVar[float] = math.inf
    everything: ClassVar[float] = 0.0

    @override
    def choice(self, q_heads: int) -> ChoiceSettings:
        return ChoiceSettings(f"of_{self.of}", _checked_heads("share", _per_head(self.share), q_heads))

    @override
    def choose(self, scores: Tensor, optional: Tensor, visible: Tensor) -> Tensor:
        shares = torch.tensor(
            _checked_heads("share", _per_head(self.share), scores.shape[1]), device=scores.device, dtype=torch.float32
        )
        if self.of == "max":
            reference = scores.amax(-1, keepdim=True)
        else:
            reference = scores.logsumexp(-1, keepdim=True) - visible.clamp(min=1).float().log()[:, None]
        least = reference + shares.log()[:, None, None]  # a share of 0 gives -inf, which every block reaches
        return (scores >= least) & optional


def _per_head(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _checked_heads(name: str, values: tuple[float, ...], heads: int) -> tuple[float, ...]:
    if len(values) not in (1, heads):
        raise ValueError(f"`{name}` must be one value or one per q head ({heads}), got {len(values)}")
    return values


def _count(budget: float, visible: Tensor) -> Tensor:
    if isinstance(budget, int):
        return torch.full_like(visible, min(budget, MAX_BLOCKS))
    return (visible.float() * budget).ceil().long()
