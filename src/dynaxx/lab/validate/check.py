# SPDX-License-Identifier: Apache-2.0
"""Checks: a figure against a limit, and what that says in words."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

MAX_DIGITS = 6  # decimals at which a value and its limit are shown at most


@dataclass(frozen=True)
class Check:
    """One figure compared with one tolerance."""

    name: str
    value: float
    limit: float
    passed: bool
    unit: str = ""
    where: str = ""  # the text, the task or the length that the figure is of
    low: float | None = None  # interval of the value, where it is known
    high: float | None = None
    derived: ClassVar[tuple[str, ...]] = ("unclear", "said")

    @property
    def unclear(self) -> bool:
        """Return whether the limit lies within the interval of the value, which fails nothing."""
        return self.passed and self.high is not None and self.high > self.limit

    @property
    def mark(self) -> str:
        """Return the result in one word."""
        return "unclear" if self.unclear else "pass" if self.passed else "FAIL"

    @property
    def said(self) -> str:
        """Return the check in words, with as many decimals as tell the value from its limit."""
        if self.name == "perplexity_ratio":
            value, limit = apart(100 * (self.value - 1), 100 * (self.limit - 1), 2)
            return f"perplexity {_signed(value)} % (limit {_signed(limit)} %) on {self.where or 'held-out text'}"
        if self.name == "top1_agreement":
            value, limit = apart(100 * self.value, 100 * self.limit, 1)
            return f"the most likely next token is the same for {value} % of the tokens (at least {limit} %)"
        if self.name == "slowdown":
            value, limit = apart(self.value, self.limit, 2)
            at = f" of {self.where}" if self.where else ""
            within = ""
            if self.low is not None and self.high is not None and self.low < self.high:  # equal after one pair of runs
                within = f"; {self.low:.2f} to {self.high:.2f} measured"
            return f"prefill{at} takes {value} times as long as dense (limit {limit}{within})"
        if self.name == "repetition_increase":
            value, limit = apart(100 * self.value, 100 * self.limit, 1)
            return f"repeated 4-grams in generated text {_signed(value)} points (limit {_signed(limit)})"
        if self.name == "task_logprob_drop":
            value, limit = apart(self.value, self.limit, 3)
            return f"{value} nats lost per answer token (limit {limit}) on {self.where or 'retrieval tasks'}"
        if self.name == "suite":
            return f"{self.value:g} informative long-context tasks fail (limit {self.limit:g}){self.where}"
        value, limit = apart(self.value, self.limit, 4)
        return f"{self.name.replace('_', ' ')}: {value} {self.unit}".rstrip() + f" (limit {limit})"


def apart(value: float, limit: float, digits: int) -> tuple[str, str]:
    """Return both with the same decimals, more of them while they look the same and are not."""
    digits = decimals(limit, digits)
    while value != limit and f"{value:.{digits}f}" == f"{limit:.{digits}f}" and digits < MAX_DIGITS:
        digits += 1
    shown = f"{value:.{digits}f}"
    return shown if float(shown) else shown.removeprefix("-"), f"{limit:.{digits}f}"


def decimals(limit: float, least: int) -> int:
    """Return the decimals, at least `least`, that show three digits of a limit however small it is."""
    exponent = Decimal(f"{limit:.3g}").normalize().as_tuple().exponent
    return max(least, -exponent) if isinstance(exponent, int) else least


def _signed(number: str) -> str:
    return number if number.startswith("-") and float(number) else f"+{number.removeprefix('-')}"
