# SPDX-License-Identifier: Apache-2.0
"""Make one choice for all q heads of a group, by the sum of the heads' estimates.

A budget on attention mass sums the heads' shares of mass. A budget that only ranks blocks sums each head's mass
relative to its best available block. Estimates of sharp heads exaggerate the largest shares, and those blocks are
chosen either way, so relative sums rank the other blocks better (docs/guides/selection.md has the measurement).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.selection.choice import Choice
from dynaxx.selection.scorers.base import log_share


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
