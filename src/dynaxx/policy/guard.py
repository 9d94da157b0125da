# SPDX-License-Identifier: Apache-2.0
"""Decide what the guard does: compare estimates of a layer with the policy's limits, with hysteresis.

This module holds state only: it takes measurements and returns a level. The integrations measure.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dynaxx.policy.document import Document, NotNegative, Positive, Share

FAILURES_IN_A_ROW = 3  # failures until a layer rests
REST_CALLS, MAX_REST_CALLS = 64, 16_384  # dense calls of the first rest; it doubles with each further failure


class Guard(Document):
    """The settings of the guard: the measurements on running traffic, their limits, and the action beyond a limit."""

    former_names: ClassVar[dict[str, str]] = {
        "least_recall": "min_recall",
        "most_error": "max_error",
        "most_kl": "max_kl",
    }
    sample: Share = 0.01  # share of sparse layer calls that are measured
    rows: Annotated[Positive, Field(le=65_536)] = 16  # query rows per measured call, recomputed densely
    min_recall: Share | None = None  # lower limit on recall, mean over heads and rows; None means no limit
    max_error: NotNegative | None = None  # upper limit on the relative output error, mean over heads and rows
    kl_sample: Share = 0.0  # share of requests whose next-token distribution is compared with the dense model's
    max_kl: NotNegative | None = None  # upper limit on that divergence, nats
    window: Annotated[Positive, Field(le=1_000_000)] = 16  # samples per mean that is compared with a limit
    margin: Annotated[Share, Field(lt=1)] = 0.2  # share of the limit by which a mean must be within it to recover
    action: Literal["count", "warn", "widen", "dense"] = "count"  # action beyond a limit
    widen: Annotated[float, Field(gt=1, le=1000)] = 2.0  # factor on budgets and windows for "widen"

    @property
    def action_level(self) -> Level:
        """The level of a layer beyond a limit."""
        return {"count": Level.OK, "warn": Level.WARNED, "widen": Level.WIDENED, "dense": Level.DENSE}[self.action]


class Level(enum.IntEnum):
    """The action that the guard has taken on a layer."""

    OK = 0
    WARNED = 1
    WIDENED = 2
    DENSE = 3


class Monitor:
    """Compare the mean of the last values with a limit, with hysteresis.

    The limit is crossed once the mean of a full window is beyond it. It is met again once the mean is within the limit
    by the margin.

    Args:
        limit: the limit, in the unit of the values.
        window: number of values per mean.
        margin: share of the limit by which the mean must be within it to recover.
        least: True for a lower limit, False for an upper one.
    """

    def __init__(self, limit: float, *, window: int, margin: float, least: bool = False) -> None:
        self.limit = limit
        self.least = least
        room = (1 - limit) if least else limit
        self._again = limit + margin * room if least else limit - margin * room
        self._values: deque[float] = deque(maxlen=window)
        self.beyond = False

    @property
    def mean(self) -> float | None:
        """The mean of the last values; None before the first."""
        return sum(self._values) / len(self._values) if self._values else None

    def add(self, value: float) -> bool:
        """Add a value and return whether the limit is crossed."""
        self._values.append(value)
        if len(self._values) == self._values.maxlen:
            mean = sum(self._values) / len(self._values)
            edge = self._again if self.beyond else self.limit
            self.beyond = mean < edge if self.least else mean > edge
        return self.beyond

    def clear(self) -> None:
        """Drop the values, but keep whether the limit is crossed."""
        self._values.clear()


class LayerGuard:
    """The guard's level of one layer, or of a whole model.

    Measurements always concern the policy's own budgets, even while a layer is widened or dense, so that a recovery
    shows. While a layer is widened, the wider budgets are measured too; if they also exceed a limit, it runs dense.
    """

    def __init__(self, settings: Guard) -> None:
        self.settings = settings
        self.level = Level.OK
        self._nominal = self._monitors()
        self._widened = self._monitors()

    def _monitors(self) -> dict[str, Monitor]:
        s = self.settings
        limits = {"recall": s.min_recall, "error": s.max_error, "kl": s.max_kl}
        return {
            name: Monitor(limit, window=s.window, margin=s.margin, least=name == "recall")
            for name, limit in limits.items()
            if limit is not None
        }

    def add(self, nominal: dict[str, float], widened: dict[str, float] | None = None) -> bool:
        """Add the measurements of one sample by name ("recall", "error", "kl"); return whether a limit is crossed."""
        beyond = _add(self._nominal, nominal)
        if not beyond:
            self.level = Level.OK
        elif self.level < self.settings.action_level:
            self.level = self.settings.action_level
            for monitor in self._widened.values():
                monitor.clear()
                monitor.beyond = False
        elif self.level == Level.WIDENED and widened is not None and _add(self._widened, widened):
            self.level = Level.DENSE
        return beyond

    def reasons(self) -> list[str]:
        """Return descriptions of the crossed limits."""
        return [
            f"{name} {monitor.mean:.4g} beyond {monitor.limit:g}"
            for name, monitor in self._nominal.items()
            if monitor.beyond and monitor.mean is not None
        ]


def _add(monitors: dict[str, Monitor], values: dict[str, float]) -> bool:
    for name, value in values.items():
        if name in monitors:
            monitors[name].add(value)
    return any(monitor.beyond for monitor in monitors.values())


class Breaker:
    """Keep a layer dense for a while after repeated failures, so that not every request pays for a failing try."""

    def __init__(self) -> None:
        self._failures = 0
        self._rest = REST_CALLS
        self._left = 0

    @property
    def healthy(self) -> bool:
        """Return whether no call has failed since the last one that worked."""
        return not self._failures

    def resting(self) -> bool:
        """Return whether this call must run dense, and count it."""
        if self._left:
            self._left -= 1
            return True
        return False

    def failed(self) -> None:
        """Record that a call failed."""
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            self._left, self._rest = self._rest, min(2 * self._rest, MAX_REST_CALLS)

    def worked(self) -> None:
        """Record that a call ran."""
        if self._failures:
            self._failures, self._rest = 0, REST_CALLS


def failure_reason(error: BaseException) -> Literal["out_of_memory", "compile_failed", "kernel_failed"]:
    """Return the kind of failure of a kernel's exception, which is also the name of its event."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    message = f"{type(error).__module__}.{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds or "can't allocate memory" in message:
        return "out_of_memory"
    if "compil" in message or "CalledProcessError" in kinds or "outofresources" in message:
        return "compile_failed"
    return "kernel_failed"
