# SPDX-License-Identifier: Apache-2.0
"""The facts of an overview as text, for the terminal and the page."""

from __future__ import annotations

from dynaxx.telemetry.overview import DRIFTED, ERROR_HIGH, GUARD, RECALL_LOW, LayerEstimates, Overview

LAYER_COLUMNS = ("layer", "density", "recall", "output error", "drift / limit")
MAX_REASONS = 4


def about(seen: Overview) -> list[str]:
    """Return what is read, and of what time."""
    up = f"up {duration(seen.uptime_seconds)}" if seen.uptime_seconds is not None else ""
    over = f"last {duration(seen.window_seconds)}" if seen.window_seconds else ""
    return [text for text in (seen.source, up, over) if text]


def facts(seen: Overview) -> dict[str, dict[str, str]]:
    """Return names and values by title."""
    requests, tokens = (
        sum(rates.values()) if seen.window_seconds else None
        for rates in (seen.requests_per_second, seen.tokens_per_second)
    )
    sparse = seen.requests_per_second.get("sparse", 0.0)
    digest = str(seen.policy.get("digest", "-"))
    return {
        "traffic": {
            "requests": "-" if requests is None else f"{requests:.3g} /s",
            "sparse requests": share(sparse / requests if requests else None),
            "tokens": "-" if tokens is None else f"{number(tokens)} /s",
            "prefill p50": duration(seen.request_seconds.get("p50")),
            "prefill p95": duration(seen.request_seconds.get("p95")),
        },
        "attention": {
            "density": share(seen.density),
            "overlap": share(seen.overlap),
            "time per call": duration(seen.attention_seconds),
            "achieved": number(seen.flops_per_second, "FLOP/s"),
            "memory traffic": number(seen.bytes_per_second, "B/s"),
            "selection": share(seen.selection_share),
        },
        "faithful": {
            "recall": share(seen.recall),
            "output error": share(seen.output_error),
            "next-token KL": number(seen.next_token_kl, "nat", least=1e-6),
            "drift / limit": share(seen.drift),
            "fall back": share(seen.fallback_share),
        },
        "in force": {
            "kill switch": f"on {seen.killed_by}".strip() if seen.kill_switch else "off",
            "policy": digest[:12] + (" (stale)" if seen.policy.get("stale") else ""),
            "rollout": share(seen.rollout),
            "guard": GUARD[seen.guard_level],
            "kv cache": number(seen.kv_cache_bytes, "B"),
        },
    }


def reasons(counts: dict[str, float]) -> dict[str, str]:
    """Return the largest counts, as text."""
    largest = sorted(counts.items(), key=lambda item: -item[1])[:MAX_REASONS]
    return {name.replace("_", " "): f"{count:.0f}" for name, count in largest}


def layer_cells(one: LayerEstimates) -> list[tuple[str, bool]]:
    """Return the text of each of `LAYER_COLUMNS`, and whether it is beyond its limit."""
    return [
        (str(one.layer), False),
        (share(one.density), False),
        (share(one.recall), one.recall is not None and one.recall < RECALL_LOW),
        (share(one.output_error), (one.output_error or 0.0) > ERROR_HIGH),
        (share(one.drift), (one.drift or 0.0) >= DRIFTED),
    ]


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
