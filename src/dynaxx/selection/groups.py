"""One choice for all q heads of a group: by the sum of what each of them gives to a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

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
