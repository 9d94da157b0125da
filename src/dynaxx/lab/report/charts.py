# SPDX-License-Identifier: Apache-2.0
"""Small charts as inline SVG, without a library: colours from the page's CSS, real text, a title on every mark.

CSS classes: `ink`, `soft`, `accent` (strokes and fills follow the page's light or dark colours), `g1` .. `g3` greys.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from dynaxx.lab.report.svg import BOLD, CHAR, Labels, document, padded, scale, text, ticks, x_ticks

Format = Callable[[float], str]


class Point(NamedTuple):
    """A measured point. `title` is its tooltip."""

    x: float
    y: float
    title: str = ""
    ringed: bool = False


class ChartLine(NamedTuple):
    """A line of a chart. `style` is "accent", "ink", "soft", or "dashed"."""

    name: str
    points: Sequence[Point]
    style: str = "soft"


class Line(NamedTuple):
    """A reference line at `y` (or `x`) with a label."""

    at: float
    label: str


@dataclass(frozen=True)
class Axes:
    """The axes of a line chart."""

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


def line_chart(series: Sequence[ChartLine], axes: Axes, *, alt: str) -> str:
    """Draw lines with their names at their ends. Points outside `y_range` are clipped."""
    series = [each for each in series if each.points]
    area = _Area.of(series, axes)
    drawn = [[(area.to_x(point.x), area.to_y(point.y)) for point in sorted(each.points)] for each in series]
    ends = [(min(max(points[-1][1], area.top), area.bottom), each) for points, each in zip(drawn, series, strict=True)]
    labels = Labels(drawn)
    names = [
        labels.put(each.name, area.right + 8, y + 4, style="accent" if each.style == "accent" else "ink")
        for y, each in _apart(ends)
    ]
    out = [*_scales(area, axes), *_marks(area, axes, labels)]
    clip = f"clip{zlib.crc32(alt.encode()):08x}"
    out.append(
        f'<clipPath id="{clip}"><rect x="{area.left - 6:.1f}" y="{area.top - 8:.1f}" '
        f'width="{area.right - area.left + 14:.1f}" height="{area.bottom - area.top + 14:.1f}"/></clipPath>'
        f'<g clip-path="url(#{clip})">'
    )
    for each, line_points in zip(series, drawn, strict=True):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line_points)
        out.append(f'<polyline class="line {each.style}" points="{path}"/>')
        out.extend(_dot(x, y, point, each) for (x, y), point in zip(line_points, sorted(each.points), strict=True))
    out += ["</g>", *names]
    return document(axes.width, axes.height, out, alt)


class _Area(NamedTuple):
    """The area of a chart within its axes, in pixels, and the scales that map values to it."""

    left: float
    right: float
    top: float
    bottom: float
    xs: list[float]  # all values of x
    y_range: tuple[float, float]
    to_x: Callable[[float], float]
    to_y: Callable[[float], float]

    @classmethod
    def of(cls, series: Sequence[ChartLine], axes: Axes) -> _Area:
        """Return the area that leaves space for the names of lines on the right."""
        names = 16 + max(len(each.name) * (BOLD if each.style == "accent" else CHAR) for each in series)
        left, right, top, bottom = 52.0, axes.width - names, 30.0, axes.height - 44.0
        xs = [point.x for each in series for point in each.points] + [line.at for line in axes.x_lines]
        ys = [point.y for each in series for point in each.points] + [line.at for line in axes.y_lines]
        low, high = axes.y_range or padded(min(ys), max(ys))
        to_x = scale(min(xs), max(xs), left + 8, right - 8, axes.log_x)
        return cls(left, right, top, bottom, xs, (low, high), to_x, scale(low, high, bottom, top))


def _scales(area: _Area, axes: Axes) -> Iterator[str]:
    """Draw the names and ticks of both axes."""
    yield text(area.left - 44, 14, axes.y_label, "soft")
    for tick in ticks(*area.y_range):
        y = area.to_y(tick)
        yield f'<line class="grid" x1="{area.left:.1f}" x2="{area.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield text(area.left - 8, y + 4, axes.y_format(tick), "soft", "end")
    for tick in x_ticks(sorted(set(area.xs)), axes.log_x, area.to_x):
        yield text(area.to_x(tick), area.bottom + 18, axes.x_format(tick), "soft", "middle")
    yield text((area.left + area.right) / 2, axes.height - 6, axes.x_label, "soft", "middle")


def _marks(area: _Area, axes: Axes, labels: Labels) -> Iterator[str]:
    """Draw the marked values of both axes, as lines with labels."""
    for line in axes.x_lines:
        x = area.to_x(line.at)
        yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{area.top:.1f}" y2="{area.bottom:.1f}"/>'
        spots = [(x + 6, area.top + 10, "start"), (x - 6, area.top + 10, "end"), (x + 6, area.bottom - 8, "start")]
        yield labels.place(line.label, spots)
    for line in axes.y_lines:
        y = area.to_y(line.at)
        yield f'<line class="mark" x1="{area.left:.1f}" x2="{area.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        places = ((area.right - 2, "end"), (area.left + 4, "start"))
        yield labels.place(line.label, [(x, y + side, anchor) for x, anchor in places for side in (-6, 15)])


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]],
    *,
    alt: str,
    labels: Sequence[str] = (),
    width: int = 400,
) -> str:
    """Draw horizontal bars of shares that sum to 1. The first part has the accent colour, the others are grey.

    Args:
        rows: (name, ((title, share), ...), note on the right).
        alt: description for readers who cannot see the chart.
        labels: text on the first part of each row.
        width: width of the chart in pixels.
    """
    left = 14 + max(len(row[0]) for row in rows) * CHAR
    right = 14 + max(len(row[2]) for row in rows) * CHAR
    full, out = width - left - right, []
    for index, (name, parts, note) in enumerate(rows):
        y, x = 6 + index * 38, left
        out.append(text(left - 10, y + 19, name, "ink", "end"))
        for place, (title, share) in enumerate(parts):
            shape = f'x="{x:.1f}" y="{y}" width="{max(share * full - 1, 0.5):.1f}" height="28"'
            out.append(f'<rect class="{_FILLS[min(place, 3)]}" {shape}><title>{escape(title)}</title></rect>')
            x += share * full
        if labels:
            fits = parts[0][1] * full > len(labels[index]) * CHAR + 14
            out += [text(left + 8, y + 19, labels[index], "on-accent")] if fits else []
        out.append(text(width - right + 10, y + 19, note, "soft"))
    return document(width, 38 * len(rows) + 4, out, alt)


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
    """Draw columns of cells with values between 0 and 1 as opacity, with `names` below every few columns."""
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
        out.append(text(left + (i + 0.5) * cell, rows * cell + 16, names[i], "soft", "middle"))
    for j in range(0, rows, max(1, math.ceil(15 / cell))):
        out.append(text(left - 8, (j + 0.5) * cell + 4, str(j), "soft", "end"))
    out.append(text(left, rows * cell + 34, x_label, "soft"))
    middle = rows * cell / 2
    turned = f'transform="translate(12 {middle:.1f}) rotate(-90)" text-anchor="middle"'
    out.append(f'<text class="soft" {turned}>{escape(y_label)}</text>')
    return document(int(left + cell * len(values)) + 2, int(rows * cell) + 40, out, alt)


def _dot(x: float, y: float, point: Point, series: ChartLine) -> str:
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="8"/>' if point.ringed else ""
    title = f"<title>{escape(point.title)}</title>" if point.title else ""
    return f'{ring}<circle class="dot {series.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>'


def _apart(labels: list[tuple[float, ChartLine]], gap: float = 15.0) -> list[tuple[float, ChartLine]]:
    """Move names apart, so that none covers another."""
    placed: list[tuple[float, ChartLine]] = []
    for y, each in sorted(labels, key=lambda label: label[0]):
        placed.append((max(y, placed[-1][0] + gap) if placed else y, each))
    return placed
