"""Small charts as inline SVG: no library, colours from the page's CSS variables, real text, a title on every mark.

Classes used: `ink`, `soft`, `accent` (strokes and fills follow the page's light or dark colours), `g1` .. `g3` greys.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

CHAR = 6.4  # mean width of a character at 12 px

Format = Callable[[float], str]


class Point(NamedTuple):
    """A measured point; `title` shows when the pointer rests on it."""

    x: float
    y: float
    title: str = ""
    ringed: bool = False


class Series(NamedTuple):
    """A line. `style` is "accent", "ink", "soft", or "dashed"."""

    name: str
    points: Sequence[Point]
    style: str = "soft"


class Line(NamedTuple):
    """A reference: `y` (or `x`) and what it says."""

    at: float
    label: str


@dataclass(frozen=True)
class Axes:
    """How to draw the axes of a line chart."""

    x_label: str
    y_label: str
    x_format: Format = str
    y_format: Format = str
    log_x: bool = False
    y_range: tuple[float, float] | None = None
    width: int = 400
    height: int = 264
    y_lines: Sequence[Line] = field(default_factory=tuple)
    x_lines: Sequence[Line] = field(default_factory=tuple)


def line_chart(series: Sequence[Series], axes: Axes, *, alt: str) -> str:
    """Lines with their names at their ends. Points outside `y_range` are cut off; their line shows where they went."""
    series = [each for each in series if each.points]
    right = 16 + max(len(each.name) for each in series) * CHAR
    left, top, bottom = 52.0, 30.0, axes.height - 44.0
    xs = [point.x for each in series for point in each.points] + [line.at for line in axes.x_lines]
    ys = [point.y for each in series for point in each.points] + [line.at for line in axes.y_lines]
    to_x = _scale(min(xs), max(xs), left + 8, axes.width - right - 8, axes.log_x)
    low, high = axes.y_range or _padded(min(ys), max(ys))
    to_y = _scale(low, high, bottom, top)
    edge = axes.width - right
    out = [_text(left - 44, 14, axes.y_label, "soft")]
    for tick in _ticks(low, high):
        y = to_y(tick)
        out.append(f'<line class="grid" x1="{left:.1f}" x2="{edge:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(left - 8, y + 4, axes.y_format(tick), "soft", "end"))
    for tick in _x_ticks(sorted(set(xs)), axes.log_x, to_x):
        out.append(_text(to_x(tick), bottom + 18, axes.x_format(tick), "soft", "middle"))
    out.append(_text((left + edge) / 2, axes.height - 6, axes.x_label, "soft", "middle"))
    drawn = [[(to_x(point.x), to_y(point.y)) for point in sorted(each.points)] for each in series]
    ends = [(min(max(points[-1][1], top), bottom), each) for points, each in zip(drawn, series, strict=True)]
    labels = _Labels(drawn)
    names = [
        labels.put(each.name, edge + 8, y + 4, style="accent" if each.style == "accent" else "ink")
        for y, each in _apart(ends)
    ]
    for line in axes.x_lines:
        x = to_x(line.at)
        out.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
        spots = [(x + 6, top + 10, "start"), (x - 6, top + 10, "end"), (x + 6, bottom - 8, "start")]
        out.append(labels.place(line.label, spots))
    for line in axes.y_lines:
        y = to_y(line.at)
        out.append(f'<line class="mark" x1="{left:.1f}" x2="{edge:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        spots = [(x, y + side, anchor) for x, anchor in ((edge - 2, "end"), (left + 4, "start")) for side in (-6, 15)]
        out.append(labels.place(line.label, spots))
    clip = f"clip{zlib.crc32(alt.encode()):08x}"
    out.append(
        f'<clipPath id="{clip}"><rect x="{left - 6:.1f}" y="{top - 8:.1f}" width="{edge - left + 14:.1f}" '
        f'height="{bottom - top + 14:.1f}"/></clipPath><g clip-path="url(#{clip})">'
    )
    for each, line_points in zip(series, drawn, strict=True):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line_points)
        out.append(f'<polyline class="line {each.style}" points="{path}"/>')
        out.extend(_dot(x, y, point, each) for (x, y), point in zip(line_points, sorted(each.points), strict=True))
    out += ["</g>", *names]
    return _svg(axes.width, axes.height, out, alt)


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]],
    *,
    alt: str,
    labels: Sequence[str] = (),
    width: int = 400,
) -> str:
    """Horizontal bars of shares that sum to 1; the first part is the accent, the others grey.

    Args:
        rows: (name, ((title, share), ...), note on the right).
        labels: what to write on the first part of each row.
    """
    left = 14 + max(len(row[0]) for row in rows) * CHAR
    right = 14 + max(len(row[2]) for row in rows) * CHAR
    full, out = width - left - right, []
    for index, (name, parts, note) in enumerate(rows):
        y, x = 6 + index * 38, left
        out.append(_text(left - 10, y + 19, name, "ink", "end"))
        for place, (title, share) in enumerate(parts):
            shape = f'x="{x:.1f}" y="{y}" width="{max(share * full - 1, 0.5):.1f}" height="28"'
            out.append(f'<rect class="{_FILLS[min(place, 3)]}" {shape}><title>{escape(title)}</title></rect>')
            x += share * full
        if labels:
            fits = parts[0][1] * full > len(labels[index]) * CHAR + 14
            out += [_text(left + 8, y + 19, labels[index], "on-accent")] if fits else []
        out.append(_text(width - right + 10, y + 19, note, "soft"))
    return _svg(width, 38 * len(rows) + 4, out, alt)


_FILLS = ("accent", "g1", "g2", "g3")


def matrix(
    values: Sequence[Sequence[float]],
    titles: Sequence[Sequence[str]],
    *,
    alt: str,
    names: Sequence[str],
    x_label: str,
    y_label: str,
    width: int = 980,
) -> str:
    """Columns of cells between 0 and 1 (the more, the fuller); `names` stand below every few columns."""
    rows = max(len(column) for column in values)
    cell = min(34.0, (width - 48) / len(values))
    left, out = 48.0, []
    for i, (column, said) in enumerate(zip(values, titles, strict=True)):
        for j, (value, title) in enumerate(zip(column, said, strict=True)):
            out.append(
                f'<rect class="cell" x="{left + i * cell:.1f}" y="{j * cell:.1f}" width="{cell - 1.5:.1f}" '
                f'height="{cell - 1.5:.1f}" fill-opacity="{0.05 + 0.95 * min(max(value, 0.0), 1.0):.2f}">'
                f"<title>{escape(title)}</title></rect>"
            )
    step = max(1, math.ceil(26 / cell))
    for i in range(0, len(values), step):
        out.append(_text(left + (i + 0.5) * cell, rows * cell + 16, names[i], "soft", "middle"))
    for j in range(0, rows, max(1, math.ceil(15 / cell))):
        out.append(_text(left - 8, (j + 0.5) * cell + 4, str(j), "soft", "end"))
    out.append(_text(left, rows * cell + 34, x_label, "soft"))
    middle = rows * cell / 2
    turned = f'transform="translate(12 {middle:.1f}) rotate(-90)" text-anchor="middle"'
    out.append(f'<text class="soft" {turned}>{escape(y_label)}</text>')
    return _svg(int(left + cell * len(values)) + 2, int(rows * cell) + 40, out, alt)


# ---- heat maps -----------------------------------------------------------------------------------------------------

LEVELS = 24  # shades of a heat map: more are not seen and cost bytes
INK = (9, 60, 56)  # of a full cell; the page turns it round in dark mode
PALE = (64, 190, 172)  # of an almost empty one


def heatmap_uri(codes: bytes, size: int, *, low: int = 52, high: int = 240) -> str:
    """A PNG data URI of `size` x `size` codes (0 nothing, 1 .. 255 on a log scale), see-through where there is nothing.

    Args:
        low, high: codes that are drawn empty and full: with five decades from 1 to 255, a ten-thousandth and a half.
    """
    ramp = bytes(
        0 if code <= low else min(LEVELS - 1, 1 + (code - low) * (LEVELS - 1) // (high - low)) for code in range(256)
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


# ---- pieces --------------------------------------------------------------------------------------------------------


def _svg(width: float, height: float, parts: Sequence[str], alt: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(alt)}">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, said: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'


def _dot(x: float, y: float, point: Point, series: Series) -> str:
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="8"/>' if point.ringed else ""
    title = f"<title>{escape(point.title)}</title>" if point.title else ""
    return f'{ring}<circle class="dot {series.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>'


class _Labels:
    """Words on a chart that cover neither its lines nor each other, where there is room."""

    def __init__(self, lines: Sequence[Sequence[tuple[float, float]]]) -> None:
        steps = [index / 24 for index in range(25)]
        self._taken = [
            (a[0] + (b[0] - a[0]) * step, a[1] + (b[1] - a[1]) * step)
            for line in lines
            for a, b in zip(line, line[1:] or line, strict=False)
            for step in steps
        ]

    def place(self, said: str, spots: Sequence[tuple[float, float, str]]) -> str:
        """Write at the first of the spots (x, baseline, anchor) that is free, or else at the first."""

        def free(spot: tuple[float, float, str]) -> bool:
            left, right = _span(said, spot[0], spot[2])
            return not any(left < x < right and spot[1] - 14 < y < spot[1] + 6 for x, y in self._taken)

        return self.put(said, *next(filter(free, spots), spots[0]), style="ink halo")

    def put(self, said: str, x: float, y: float, anchor: str = "start", *, style: str) -> str:
        """Write here; later words keep away."""
        left, right = _span(said, x, anchor)
        count = max(2, int((right - left) / 4))
        self._taken += [
            (left + (right - left) * index / count, y + row) for index in range(count + 1) for row in (-10, -4, 2)
        ]
        return _text(x, y, said, style, anchor)


def _span(said: str, x: float, anchor: str) -> tuple[float, float]:
    """From where to where a text goes, with some air."""
    first = x - len(said) * CHAR if anchor == "end" else x
    return first - 3, first + len(said) * CHAR + 3


def _apart(labels: list[tuple[float, Series]], gap: float = 15.0) -> list[tuple[float, Series]]:
    """Names moved so that none covers another."""
    placed: list[tuple[float, Series]] = []
    for y, each in sorted(labels, key=lambda label: label[0]):
        placed.append((max(y, placed[-1][0] + gap) if placed else y, each))
    return placed


def _scale(low: float, high: float, start: float, end: float, log: bool = False) -> Callable[[float], float]:
    """A function from values to pixels."""
    change = math.log if log else float
    first, last = change(low), change(high)
    span = (last - first) or 1.0
    return lambda value: start + (change(value) - first) / span * (end - start)


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values within a range."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _x_ticks(xs: Sequence[float], log: bool, to_x: Callable[[float], float]) -> list[float]:
    """Round values, or on a log axis the measured ones, as many as fit."""
    if not log:
        return [tick for tick in _ticks(xs[0], xs[-1]) if xs[0] <= tick <= xs[-1]] if xs[-1] > xs[0] else list(xs)
    chosen: list[float] = []
    for x in reversed(xs):
        if not chosen or to_x(chosen[-1]) - to_x(x) >= 46:
            chosen.append(x)
    return chosen[::-1]
