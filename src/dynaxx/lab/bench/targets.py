# SPDX-License-Identifier: Apache-2.0
"""Targets: thresholds that a benchmark's figures must reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Report = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """A threshold: `value` must be at least (for errors and times at most) `target`.

    A value of None could not be measured, as when the peer it is held against is not installed: neither met nor missed.
    """

    name: str
    target: float
    value: float | None
    workload: str
    at_most: bool = False

    @property
    def ok(self) -> bool | None:
        """Return whether the target is met; None if nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"name": self.name, "workload": self.workload, "target": self.target, "value": self.value, "ok": self.ok}

    def __str__(self) -> str:
        """Return a line with the verdict, the measured value and the threshold."""
        said = {True: "ok  ", False: "MISS", None: "?   "}[self.ok]
        sign = "<=" if self.at_most else ">="
        value = "not measured" if self.value is None else f"{self.value:.4g}"
        return f"{said} {self.name} [{self.workload}]: {value} {sign} {self.target:g}"
