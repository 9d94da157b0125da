# SPDX-License-Identifier: Apache-2.0
"""The time of a command: a clock, the budget, and what steps took, from which later ones are sized."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dynaxx.lab.machine import watch_others

PASS = "pass"  # kind of work: a forward pass over one text
GROWTH = 1.25  # exponent of the seconds of work over tokens, for longer texts than measured; for shorter ones it is 1
LATE = 0.1  # share of the budget by which urgent work may be late
MARGIN = 1.15  # factor on expected seconds, since no two runs take equally long


class Clock:
    """The time of this machine. Tests pass a clock on which work takes as long as they say."""

    def now(self) -> float:
        """Return the seconds since some moment."""
        return time.perf_counter()

    @contextmanager
    def work(self, kind: str, tokens: int, share: float = 1.0) -> Iterator[None]:
        """Enclose work.

        Args:
            kind: what is done.
            tokens: length of the text.
            share: share of the blocks that attention visits.
        """
        yield

    def watch(self) -> Callable[[], bool]:
        """Return a function that says whether other processes have slowed this one since now."""
        return watch_others()


class TimeBudget:
    """The seconds that a command may take, and the seconds of its work so far.

    Args:
        seconds: the limit; None means no limit.
        clock: the clock.
        spent: seconds that the command took before now.
    """

    def __init__(self, seconds: float | None = None, clock: Clock | None = None, spent: float = 0.0) -> None:
        self.seconds, self.clock = seconds, clock or Clock()
        self.started = self.clock.now() - spent
        self._reserves: list[Callable[[], float]] = []  # seconds for steps at the end, which earlier ones must leave
        self.taken: dict[tuple[str, int], float] = {}  # seconds by kind of work and tokens, the latest of each

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock.now() - self.started

    @property
    def left(self) -> float:
        """Seconds until the end, less those reserved; infinity without a limit."""
        return math.inf if self.seconds is None else self.seconds - self.reserved - self.spent

    def allows(self, seconds: float = 0.0, urgent: bool = False) -> bool:
        """Return whether work of so many expected seconds may begin; what is urgent may end a little late."""
        left = self.left + (LATE * (self.seconds or 0.0) if urgent else 0.0)
        return left > 0 and seconds * MARGIN <= left

    @property
    def reserved(self) -> float:
        """Seconds reserved for the steps at the end, as expected now."""
        return sum(seconds() for seconds in self._reserves)

    @contextmanager
    def reserving(self, seconds: Callable[[], float]) -> Iterator[None]:
        """Reserve more seconds for the steps after the block; they follow what is measured within it."""
        self._reserves.append(seconds)
        try:
            yield
        finally:
            self._reserves.remove(seconds)

    @contextmanager
    def reserving_only(self, seconds: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Let work within the block use the time that is reserved for later steps, except so many seconds."""
        reserves, self._reserves = self._reserves, [seconds]
        try:
            yield
        finally:
            self._reserves = reserves

    @contextmanager
    def work(self, kind: str, tokens: int, share: float = 1.0) -> Iterator[None]:
        """Enclose work, see `Clock.work`, and remember its seconds."""
        began = self.clock.now()
        with self.clock.work(kind, tokens, share):
            yield
        self.learn(kind, tokens, self.clock.now() - began)

    def learn(self, kind: str, tokens: int, seconds: float) -> None:
        """Remember the seconds of work."""
        self.taken[kind, tokens] = seconds

    def recall(self, taken: Sequence[tuple[str, int, float]]) -> None:
        """Expect what work took in an earlier run, times the ratio of the paces if both runs timed the same work."""
        ratios = [self.taken[kind, tokens] / seconds for kind, tokens, seconds in taken if (kind, tokens) in self.taken]
        for kind, tokens, seconds in taken:
            self.taken.setdefault((kind, tokens), seconds * (statistics.median(ratios) if ratios else 1.0))

    def expects(self, kind: str, tokens: int) -> float:
        """Return the expected seconds of work of a kind that was done before, on some length; else 0."""
        lengths = [length for each, length in self.taken if each == kind]
        if not lengths:
            return 0.0
        nearest = min(lengths, key=lambda each: abs(math.log(each / tokens)))
        ratio = tokens / nearest
        return self.taken[kind, nearest] * ratio ** (GROWTH if ratio > 1 else 1.0)
