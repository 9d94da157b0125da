# SPDX-License-Identifier: Apache-2.0
"""Parts of charts as SVG: labels that avoid each other, marks, scales and ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

CHAR = 7.2  # mean width of a character at 12 px, in wide fonts such as DejaVu Sans


def document(width: float, height: float, parts: Sequence[str], alt: str) -> str:
    """Return a chart as SVG; `alt` describes it for readers who cannot see it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" style="--w:{width:g}" '
        f'role="img" aria-label="{escape(alt)}">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, said: str, style: str, anchor: str = "start") -> str:
    """Draw text at (x, baseline y). `style` is a CSS class of the page."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'


class Labels:
    """Labels on a chart that cover neither its lines nor each other, if there is room."""

    def __init__(self, lines: Sequence[Sequence[tuple[float, float]]]) -> None:
        steps = [index / 24 for index in range(25)]
        self._taken = [
            (a[0] + (b[0] - a[0]) * step, a[1] + (b[1] - a[1]) * step)
            for line in lines
            for a, b in zip(line, line[1:] or line, strict=False)
            for step in steps
        ]

    def place(self, said: str, spots: Sequence[tuple[float, float, str]]) -> str:
        """Write at the first free spot (x, baseline, anchor), or at the first spot if none is free."""

        def free(spot: tuple[float, float, str]) -> bool:
            left, right = _span(said, spot[0], spot[2])
            return not any(left < x < right and spot[1] - 14 < y < spot[1] + 6 for x, y in self._taken)

        return self.put(said, *next(filter(free, spots), spots[0]), style="ink halo")

    def put(self, said: str, x: float, y: float, anchor: str = "start", *, style: str) -> str:
        """Write at this position, which later labels avoid."""
        left, right = _span(said, x, anchor)
        count = max(2, int((right - left) / 4))
        self._taken += [
            (left + (right - left) * index / count, y + row) for index in range(count + 1) for row in (-10, -4, 2)
        ]
        return text(x, y, said, style, anchor)


def _span(said: str, x: float, anchor: str) -> tuple[float, float]:
    """Return the horizontal extent of a text with a margin."""
    first = x - len(said) * CHAR if anchor == "end" else x
    return first - 3, first + len(said) * CHAR + 3


def scale(low: float, high: float, start: float, end: float, log: bool = False) -> Callable[[float], float]:
    """Return a function from values to pixels."""
    change = math.log if log else float
    first, last = change(low), change(high)
    span = (last - first) or 1.0
    return lambda value: start + (change(value) - first) / span * (end - start)


def padded(low: float, high: float) -> tuple[float, float]:
    """Return a range with a margin."""
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round values within a range."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def x_ticks(xs: Sequence[float], log: bool, to_x: Callable[[float], float]) -> list[float]:
    """Return round values, or on a log axis the measured values, as many as fit."""
    if not log:
        return [tick for tick in ticks(xs[0], xs[-1]) if xs[0] <= tick <= xs[-1]] if xs[-1] > xs[0] else list(xs)
    chosen: list[float] = []
    for x in reversed(xs):
        if not chosen or to_x(chosen[-1]) - to_x(x) >= 46:
            chosen.append(x)
    return chosen[::-1]
