# SPDX-License-Identifier: Apache-2.0
"""One choice for all q heads of a group: by the sum of what each of them gives to a block.

Where a choice stops at a mass, that sum is of shares of the heads' mass. Where it only ranks blocks, of shares of what
each head gives to the best block that is to be had: the sharper a head's attention, the more its largest shares are
overestimated, and those blocks are chosen anyway (docs/guides/selection.md has what that brings).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from dynaxx.selection.scorers.base import log_share

if TYPE_CHECKING:
    from dynaxx.selection.base import Selector

Per: TypeAlias = Literal["group", "head"]


def checked_per(per: str) -> None:
    """Raise ValueError for anything but a `Per`."""
    if per not in ("group", "head"):
        raise ValueError(f"`per` must be 'group' or 'head', got {per!r}")


def heads_alike(selector: Selector, q_heads: int, kv_heads: int) -> int:
    """How many neighbouring q heads choose together; 1 where each chooses by itself."""
    return q_heads // kv_heads if selector.per == "group" else 1


def shared_scores(scores: Tensor, alike: int) -> Tensor:
    """(B, Hq, R, C) logits, -inf where hidden -> (B, Hq / alike, R, C): the log of the heads' summed shares."""
    if alike == 1:
        return scores
    return log_share(scores.softmax(-1).nan_to_num_(0.0).unflatten(1, (-1, alike)).sum(2))


def shared_ranks(scores: Tensor, optional: Tensor, alike: int) -> Tensor:
    """(B, Hq, R, C) logits -> (B, Hq / alike, R, C): the log of what the heads give, each relative to its best block.

    Args:
        optional: (..., R, C) bool, the blocks to choose from; where heads share, all others get -inf.
    """
    if alike == 1:
        return scores
    scores = scores.masked_fill(~optional, -torch.inf)
    best = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    return log_share(scores.sub_(best).exp_().unflatten(1, (-1, alike)).sum(2)).masked_fill_(~optional, -torch.inf)
