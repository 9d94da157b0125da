# SPDX-License-Identifier: Apache-2.0
"""Draw an overview on a terminal, with rich."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynaxx.telemetry.facts import LAYER_COLUMNS, about, facts, layer_cells, reasons
from dynaxx.telemetry.overview import BackgroundWatch, LayerEstimates, Overview, Watch, describe_event

MAX_LAYERS, MAX_EVENTS = 8, 5
STYLE = {"bad": "bold red", "warn": "yellow"}


def show(seen: Overview) -> RenderableType:
    """Draw an overview that fits into 80 columns."""
    parts: list[RenderableType] = [_title(seen)]
    parts += [Text(f"● {concern.text}", style=STYLE[concern.level]) for concern in seen.concerns]
    if not seen.concerns:
        parts.append(Text("● no concerns", style="green"))
    both = Table.grid(padding=(0, 4))
    traffic, attention, faithful, in_force = (_facts(title, rows) for title, rows in facts(seen).items())
    both.add_row(traffic, attention)
    both.add_row("", "")
    both.add_row(faithful, in_force)
    parts += [Text(), both]
    if seen.layers:
        parts += [Text(), _layers(seen.layers)]
    if seen.dense_calls:
        parts += [Text(), _counts("dense calls  ", seen.dense_calls)]
    if seen.fallbacks:
        parts.append(_counts("fallbacks    ", seen.fallbacks))
    if seen.recent_events:
        parts += [Text(), Text("events", style="bold")]
        for event in reversed(seen.recent_events[-MAX_EVENTS:]):
            at = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
            parts.append(Text.assemble((f"  {at}  ", "dim"), describe_event(event)))
    elif seen.event_counts:
        parts += [Text(), _counts("events  ", seen.event_counts)]
    return Group(*parts)


def as_text(seen: Overview, width: int = 100) -> str:
    """Return the overview as plain text."""
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(show(seen))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def run(watch: Watch, interval: float, console: Console, *, sleep: Callable[[float], Any] = time.sleep) -> None:
    """Draw again every `interval` seconds until Ctrl-C."""
    looking = BackgroundWatch(watch, interval)
    try:
        with Live(show(looking.latest()), console=console, screen=True, auto_refresh=False) as live:
            while True:
                sleep(interval)
                live.update(show(looking.latest()), refresh=True)
    finally:
        looking.close()


def _title(seen: Overview) -> Table:
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True)
    title.add_column(justify="right", no_wrap=True)
    name = ", ".join(seen.models) or "a process"
    title.add_row(
        Text.assemble(("dynaxx ", "bold cyan"), (name, "bold")),
        Text("  ".join(about(seen)), style="dim", overflow="ellipsis"),
    )
    return title


def _facts(title: str, rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=15)
    table.add_column(justify="right", min_width=14)
    table.add_row(Text(title, style="bold not dim"), "")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _layers(layers: list[LayerEstimates]) -> Table:
    """Return a table of layers, ordered by the ratio of their worst estimate to its limit."""
    worst = sorted(layers, key=lambda one: -one.strain)
    table = Table(box=None, padding=(0, 2), header_style="bold", pad_edge=False)
    for name in LAYER_COLUMNS:
        table.add_column(name, justify="right")
    for one in worst[:MAX_LAYERS]:
        table.add_row(*(Text(text, style=STYLE["bad"] if wrong else "") for text, wrong in layer_cells(one)))
    if len(layers) > MAX_LAYERS:
        table.caption = f"{len(layers) - MAX_LAYERS} more"
        table.caption_justify = "left"
    return table


def _counts(title: str, counts: dict[str, float]) -> Text:
    return Text.assemble((title, "bold"), ", ".join(f"{name} {count}" for name, count in reasons(counts).items()))
