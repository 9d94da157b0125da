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

from dynaxx.telemetry.background_watch import BackgroundWatch
from dynaxx.telemetry.overview import GUARD, LayerEstimates, Overview, Watch, describe_event

MAX_LAYERS, MAX_EVENTS = 8, 5
STYLE = {"bad": "bold red", "warn": "yellow"}


def show(seen: Overview) -> RenderableType:
    """Draw an overview that fits into 80 columns."""
    parts: list[RenderableType] = [_title(seen)]
    parts += [Text(f"● {concern.text}", style=STYLE[concern.level]) for concern in seen.concerns]
    if not seen.concerns:
        parts.append(Text("● no concerns", style="green"))
    both = Table.grid(padding=(0, 4))
    both.add_row(_facts("traffic", _traffic(seen)), _facts("attention", _attention(seen)))
    both.add_row("", "")
    both.add_row(_facts("faithful", _faithful(seen)), _facts("in force", _in_force(seen)))
    parts += [Text(), both]
    if seen.layers:
        parts += [Text(), _layers(seen.layers)]
    if seen.dense_calls:
        reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in _most(seen.dense_calls))
        parts += [Text(), Text.assemble(("dense calls  ", "bold"), reasons)]
    if seen.fallbacks:
        reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in _most(seen.fallbacks))
        parts.append(Text.assemble(("fallbacks    ", "bold"), reasons))
    if seen.recent_events:
        parts += [Text(), Text("events", style="bold")]
        for event in reversed(seen.recent_events[-MAX_EVENTS:]):
            at = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
            parts.append(Text.assemble((f"  {at}  ", "dim"), describe_event(event)))
    elif seen.event_counts:
        counts = ", ".join(f"{name.replace('_', ' ')} {count:.0f}" for name, count in _most(seen.event_counts))
        parts += [Text(), Text.assemble(("events  ", "bold"), counts)]
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


def duration(seconds: float | None) -> str:
    """Return seconds as text: 3725 gives "1 h 02 min", 0.00123 gives "1.23 ms"."""
    if seconds is None:
        return "-"
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return number(seconds, "s", least=1e-6)


def number(value: float | None, unit: str = "", *, least: float = 1.0) -> str:
    """Return a number with a unit prefix: 1234567 gives "1.23 M", and with a smaller `least` 0.00123 gives "1.23 m"."""
    if value is None:
        return "-"
    factor, prefix = 1.0, ""
    for step, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= step or step <= least:
            factor, prefix = step, sign
            break
    text = f"{value / factor:.3g}" if abs(value / factor) < 999.5 else f"{value / factor:.0f}"
    return f"{text} {prefix}{unit}".rstrip()


def share(value: float | None) -> str:
    """Return a share in percent: 0.0812 gives "8.1 %", None gives "-"."""
    return "-" if value is None else f"{value:.1%}".replace("%", " %")


def _title(seen: Overview) -> Table:
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True)
    title.add_column(justify="right", no_wrap=True)
    name = ", ".join(seen.models) or "a process"
    up = f"up {duration(seen.uptime_seconds)}" if seen.uptime_seconds is not None else ""
    over = f"last {duration(seen.window_seconds)}" if seen.window_seconds else ""
    title.add_row(
        Text.assemble(("dynaxx ", "bold cyan"), (name, "bold")),
        Text("  ".join(filter(None, (seen.source, up, over))), style="dim", overflow="ellipsis"),
    )
    return title


def _facts(title: str, facts: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=15)
    table.add_column(justify="right", min_width=14)
    table.add_row(Text(title, style="bold not dim"), "")
    for name, value in facts:
        table.add_row(name, value)
    return table


def _traffic(seen: Overview) -> list[tuple[str, str]]:
    requests = sum(seen.requests_per_second.values()) if seen.window_seconds else None
    tokens = sum(seen.tokens_per_second.values()) if seen.window_seconds else None
    sparse = seen.requests_per_second.get("sparse", 0.0)
    return [
        ("requests", "-" if requests is None else f"{requests:.3g} /s"),
        ("sparse requests", share(sparse / requests if requests else None)),
        ("tokens", "-" if tokens is None else f"{number(tokens)} /s"),
        ("prefill p50", duration(seen.request_seconds.get("p50"))),
        ("prefill p95", duration(seen.request_seconds.get("p95"))),
    ]


def _attention(seen: Overview) -> list[tuple[str, str]]:
    return [
        ("density", share(seen.density)),
        ("time per call", duration(seen.attention_seconds)),
        ("achieved", number(seen.flops_per_second, "FLOP/s")),
        ("memory traffic", number(seen.bytes_per_second, "B/s")),
        ("selection", share(seen.selection_share)),
    ]


def _faithful(seen: Overview) -> list[tuple[str, str]]:
    return [
        ("recall", share(seen.recall)),
        ("output error", share(seen.output_error)),
        ("next-token KL", number(seen.next_token_kl, "nat", least=1e-6)),
        ("drift / limit", share(seen.drift)),
        ("fall back", share(seen.fallback_share)),
    ]


def _in_force(seen: Overview) -> list[tuple[str, str]]:
    digest = str(seen.policy.get("digest", "-"))
    return [
        ("kill switch", f"on {seen.killed_by}".strip() if seen.kill_switch else "off"),
        ("policy", digest[:12] + (" (stale)" if seen.policy.get("stale") else "")),
        ("rollout", share(seen.rollout)),
        ("guard", GUARD[seen.guard_level]),
        ("kv cache", number(seen.kv_cache_bytes, "B")),
    ]


def _layers(layers: list[LayerEstimates]) -> Table:
    """Return a table of layers, ordered by the ratio of their worst estimate to its limit."""
    worst = sorted(layers, key=lambda one: -one.strain)
    table = Table(box=None, padding=(0, 2), header_style="bold", pad_edge=False)
    for name in ("layer", "density", "recall", "output error", "drift / limit"):
        table.add_column(name, justify="right")
    for one in worst[:MAX_LAYERS]:
        table.add_row(str(one.layer), share(one.density), share(one.recall), share(one.output_error), share(one.drift))
    if len(layers) > MAX_LAYERS:
        table.caption = f"{len(layers) - MAX_LAYERS} more"
        table.caption_justify = "left"
    return table


def _most(counts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(counts.items(), key=lambda item: -item[1])[:4]
