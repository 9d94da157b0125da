# SPDX-License-Identifier: Apache-2.0
"""Parts of charts as SVG: labels that avoid each other, marks, scales and ticks."""

from __future__ import annotations

import base64
import io
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from dynaxx.patterns import Causal, Full, Pattern
from dynaxx.policy import Policy
from dynaxx.policy.specs import parts

CHAR = 7.2  # mean width of a character at 12 px, in wide fonts such as DejaVu Sans
BOLD = 8.6  # the same in bold


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


LEVELS = 24  # shades of a heat map; more are invisible and cost bytes
EMPTY = 52  # largest code that is drawn empty; with five decades from 1 to 255, a share of 1e-4
FULL = 240  # smallest code that is drawn full: a share of one half
INK = (20, 26, 78)  # colour of a full cell; the page inverts it in dark mode
PALE = (125, 143, 224)  # colour of an almost empty cell
TOKENS = 1024  # tokens that a picture shows
MAX_PICTURES = 3


def pattern_pictures(document: dict[str, Any]) -> list[dict[str, str]]:
    """Draw the first patterns of a policy's prefill rules, dense ones left out.

    Blocks that a selector adds depend on the prompt and are not drawn.

    Returns:
        For each picture its caption and a PNG as a data URI. Empty without matplotlib, or if the document is no policy
        of this version.
    """
    try:
        policy = Policy.model_validate(document)
    except ValueError:
        return []
    found: dict[Pattern, bool] = {}  # pattern: whether a selector adds blocks
    for rule in policy.rules:
        pattern, selector = parts(rule.attention.build()) if rule.phase == "prefill" else (None, None)
        if pattern is not None and not isinstance(pattern, (Causal, Full)):
            found.setdefault(pattern, selector is not None)
    try:
        if found:  # the import takes seconds on a busy machine
            from matplotlib.figure import Figure
    except ImportError:
        return []
    pictures = []
    for pattern, adds in list(found.items())[:MAX_PICTURES]:
        figure = Figure(figsize=(4.2, 4.2), layout="constrained")
        pattern.layout(TOKENS, block_size=policy.block_size).plot(ax=figure.subplots())
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=96)
        uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        caption = "always visible; the rule adds blocks by content" if adds else "visible keys"
        pictures.append({"uri": uri, "caption": caption})
    return pictures


def heatmap_uri(codes: bytes, size: int) -> str:
    """Encode a heat map as a PNG data URI, transparent where it is empty.

    Args:
        codes: `size` * `size` bytes: 0 is zero, 1 to 255 are on a log scale.
        size: number of rows and columns.
    """
    ramp = bytes(
        0 if code <= EMPTY else min(LEVELS - 1, 1 + (code - EMPTY) * (LEVELS - 1) // (FULL - EMPTY))
        for code in range(256)
    )
    pixels = codes.translate(ramp)
    lines = b"".join(b"\0" + pixels[start : start + size] for start in range(0, size * size, size))
    palette, alpha = bytearray(), bytearray()
    for level in range(LEVELS):
        t = level / (LEVELS - 1)
        palette += bytes(round(pale + (ink - pale) * t) for pale, ink in zip(PALE, INK, strict=True))
        alpha.append(round(255 * min(1.0, 1.15 * t)))
    png = b"\x89PNG\r\n\x1a\n"
    png += _chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 3, 0, 0, 0))
    png += _chunk(b"PLTE", bytes(palette)) + _chunk(b"tRNS", bytes(alpha))
    png += _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
