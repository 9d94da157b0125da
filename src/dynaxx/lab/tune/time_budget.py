# SPDX-License-Identifier: Apache-2.0
"""The time budget of a tuning run."""

from __future__ import annotations

import math
import time

# Shares of the budget by which three steps must end: the costs of heads, the search with budgets per head, and the
# search with one budget for all heads. The rest is for timing, decode rules and the reference.
COSTS_UNTIL, TASK_COSTS_UNTIL, TUNED_UNTIL, UNIFORM_UNTIL = 0.4, 0.5, 0.7, 0.85


class TimeBudget:
    """The seconds that may be spent from now on. None means no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.started = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds until the end; infinity without a limit, negative beyond it."""
        return math.inf if self.seconds is None else self.seconds - self.spent

    def allows(self, share: float, seconds: float = 0.0) -> bool:
        """Return whether another `seconds` fit into a share of the budget."""
        return self.seconds is None or self.spent + seconds <= share * self.seconds
