# SPDX-License-Identifier: Apache-2.0
"""Decide what the guard does: compare estimates of a layer with the policy's limits, with hysteresis.

Pure state: measurements come in, a level comes out. Who measures, and when, is an integration's matter.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Annotated, Literal

from pydantic import Field

from dynaxx.policy.document import Document, NotNegative, Positive, Share

FAILURES_IN_A_ROW = 3  # after which a layer rests
REST_CALLS, MOST_REST_CALLS = 64, 16_384  # a layer that fails again rests twice as long, up to the second


class Guard(Document):
    """The settings of the guard: what is measured on running traffic, the limits, and the action beyond them."""

    sample: Share = 0.01  # of sparse layer calls
    rows: Annotated[Positive, Field(le=65_536)] = 16  # query rows of each that are computed again, densely
    least_recall: Share | None = None  # mean over heads and rows; None is not held to anything
    most_error: NotNegative | None = None  # relative error of the attention output, mean over heads and rows
    kl_sample: Share = 0.0  # of requests whose next-token distribution is compared with the dense model's
    most_kl: NotNegative | None = None  # nats
    window: Annotated[Positive, Field(le=1_000_000)] = 16  # samples whose mean is held against a limit
    margin: Annotated[Share, Field(lt=1)] = 0.2  # a limit is kept again only when this share of it is to spare
    action: Literal["count", "warn", "widen", "dense"] = "count"  # beyond a limit
    widen: Annotated[float, Field(gt=1, le=1000)] = 2.0  # factor on budgets and windows

    @property
    def action_level(self) -> Level:
        """The level that a layer gets beyond a limit."""
        return {"count": Level.OK, "warn": Level.WARNED, "widen": Level.WIDENED, "dense": Level.DENSE}[self.action]


class Level(enum.IntEnum):
    """The action that the guard has taken on a layer."""

    OK = 0
    WARNED = 1
    WIDENED = 2
    DENSE = 3


class Monitor:
    """Compares the mean of the last values with a limit, with hysteresis.

    The limit is crossed once a full window's mean is beyond it, and kept again once the mean is within it by a margin.

    Args:
        limit: in the unit of the values.
        least: whether values must be at least the limit, and not at most.
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
        """Add a value, and return whether the limit is crossed now."""
        self._values.append(value)
        if len(self._values) == self._values.maxlen:
            mean = sum(self._values) / len(self._values)
            edge = self._again if self.beyond else self.limit
            self.beyond = mean < edge if self.least else mean > edge
        return self.beyond

    def clear(self) -> None:
        """Forget the values, not the verdict."""
        self._values.clear()


class LayerGuard:
    """Keeps the level of one layer, or of a whole model.

    Measurements are of the policy's own budgets, also while a layer is widened or dense, so a recovery is seen. While
    widened, those of the wider budgets are watched too: where they do not help, the layer goes dense.
    """

    def __init__(self, settings: Guard) -> None:
        self.settings = settings
        self.level = Level.OK
        self._nominal = self._monitors()
        self._widened = self._monitors()

    def _monitors(self) -> dict[str, Monitor]:
        s = self.settings
        limits = {"recall": s.least_recall, "error": s.most_error, "kl": s.most_kl}
        return {
            name: Monitor(limit, window=s.window, margin=s.margin, least=name == "recall")
            for name, limit in limits.items()
            if limit is not None
        }

    def add(self, nominal: dict[str, float], widened: dict[str, float] | None = None) -> bool:
        """Add one sample's measurements by name ("recall", "error", "kl"); return whether a limit is crossed now."""
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
        """Return the limits that are crossed, in words."""
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
    """Keeps a layer that fails again and again dense for a while, so that requests do not pay for each try."""

    def __init__(self) -> None:
        self._failures = 0
        self._rest = REST_CALLS
        self._left = 0

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
            self._left, self._rest = self._rest, min(2 * self._rest, MOST_REST_CALLS)

    def worked(self) -> None:
        """Record that a call ran."""
        if self._failures:
            self._failures, self._rest = 0, REST_CALLS


def failure_reason(error: BaseException) -> Literal["out_of_memory", "compile_failed", "kernel_failed"]:
    """Return the kind of failure that a kernel's exception is, which is also the name of its event."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    said = f"{type(error).__module__}.{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds or "can't allocate memory" in said:
        return "out_of_memory"
    if "compil" in said or "CalledProcessError" in kinds or "outofresources" in said:
        return "compile_failed"
    return "kernel_failed"
