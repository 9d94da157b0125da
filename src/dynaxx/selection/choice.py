# SPDX-License-Identifier: Apache-2.0
"""`Choice`: how a selector chooses blocks from scores, in torch and as numbers for kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dynaxx.selection.scorers.base import Scorer, log_share
from dynaxx.settings import Configured

Per: TypeAlias = Literal["group", "head"]


class ChoiceSettings(NamedTuple):
    """A selector's rule as numbers for a kernel."""

    mode: str  # "top_k", "top_p", "of_max" or "of_uniform"
    amounts: tuple[float, ...]  # one value, or one per q head
    shares: bool = False  # top_k: whether amounts are shares of the visible blocks rather than numbers of blocks
    floor: int = 0  # top_k: rows that see fewer blocks than this get the share of this many


class Choice(Configured, ABC):
    """Base of `Selector`: a scorer and a budget."""

    scorer: Scorer
    per: Per = "head"  # "group": all q heads of a kv head choose together
    only_ranks: ClassVar[bool] = False  # whether only the order of the scores matters
    budget_field: ClassVar[str]  # name of the field that sets how much to keep: one value, or one per q head
    nothing: ClassVar[float] = 0.0  # the budget that keeps no block beyond a pattern's
    everything: ClassVar[float] = 1.0  # the budget that keeps every visible block

    @abstractmethod
    def choose(self, scores: Tensor, optional: Tensor, visible: Tensor) -> Tensor:
        """Choose blocks.

        Args:
            scores: (B, Hq, R, C) fp32 logits, -inf for blocks that no query of the row may see.
            optional: (..., R, C) bool, the blocks to choose from; the other visible blocks are always visited.
            visible: (R,) int64, the number of blocks that each row may see.

        Returns:
            (B, Hq, R, C) bool, a subset of `optional`.
        """

    def choice(self, q_heads: int) -> ChoiceSettings | None:
        """Return the rule of `choose` as numbers for a kernel, or None if it has no such form and torch must run it.

        Raises:
            ValueError: the budget is per head, for another number of heads.
        """
        return None


def count_heads_per_choice(selector: Choice, q_heads: int, kv_heads: int) -> int:
    """Return the number of neighbouring q heads that choose together, 1 if each head chooses alone."""
    return q_heads // kv_heads if selector.per == "group" else 1


def shared_scores(scores: Tensor, heads_per_choice: int) -> Tensor:
    """Return the log of the heads' summed shares: (B, Hq, R, C) logits -> (B, Hq / heads_per_choice, R, C)."""
    if heads_per_choice == 1:
        return scores
    return log_share(scores.softmax(-1).nan_to_num_(0.0).unflatten(1, (-1, heads_per_choice)).sum(2))


def shared_ranks(scores: Tensor, optional: Tensor, heads_per_choice: int) -> Tensor:
    """Return the log of the heads' summed masses, each relative to the head's best block.

    Args:
        scores: (B, Hq, R, C) logits.
        optional: (..., R, C) bool, the blocks to choose from; if heads choose together, all others get -inf.
        heads_per_choice: number of neighbouring q heads that choose together.

    Returns:
        (B, Hq / heads_per_choice, R, C) fp32.
    """
    if heads_per_choice == 1:
        return scores
    scores = scores.masked_fill(~optional, -torch.inf)
    best = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    return log_share(scores.sub_(best).exp_().unflatten(1, (-1, heads_per_choice)).sum(2)).masked_fill_(
        ~optional, -torch.inf
    )
