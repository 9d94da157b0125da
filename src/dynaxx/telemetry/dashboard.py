# SPDX-License-Identifier: Apache-2.0
"""Write a Grafana dashboard of the catalog's metrics: `python -m dynaxx.telemetry.dashboard > dashboard.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dynaxx.telemetry.catalog import CATALOG
from dynaxx.telemetry.overview import DRIFTED, ERROR_HIGH, RECALL_LOW

SCHEMA_VERSION = 39  # of Grafana's dashboards
COLUMNS = 24  # of Grafana's grid
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
FILTER = 'model_name=~"$model_name", engine=~"$engine"'
INTERVAL = "$__rate_interval"
CALLS_OF_MODELS = 'dynaxx_layer_calls_total{model_name=~"$model_name"}'
ABOVE, BELOW = ("green", "red"), ("red", "green")  # colors before and from a limit, where high is bad or low is bad
STAT_OPTIONS = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "area",
}
GRAPH_OPTIONS = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
TABLE_TRANSFORMATION = {
    "id": "organize",
    "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True, "job": True}},
}


@dataclass(frozen=True)
class Panel:
    """One panel of the dashboard. Its description is the catalog's help of the metrics that it shows.

    Attributes:
        queries: PromQL expressions by legend.
        unit: one of Grafana's units.
        form: "stat" is one number; "stacked" and "bars" are time series too.
        width: columns of Grafana's 24.
        limits: colors, each with the value from which it applies; the first applies below.
        texts: words for values.
    """

    title: str
    unit: str
    queries: Mapping[str, str]
    form: Literal["stat", "lines", "stacked", "bars", "table"] = "lines"
    width: int = 8
    minimum: float | None = None
    maximum: float | None = None
    limits: tuple[tuple[str, float | None], ...] = (("green", None),)
    texts: Mapping[str, str] = field(default_factory=dict)


def series(name: str, extra: str = "") -> str:
    """Return the selector of a series of the chosen models and engines; `extra` is a condition on labels."""
    return f"dynaxx_{name}{{{', '.join(filter(None, (FILTER, extra)))}}}"


def total(name: str, by: str = "", *, function: str = "rate", extra: str = "", interval: str = INTERVAL) -> str:
    """Return the sum of a counter's rates by labels."""
    return f"sum{f' by ({by}) ' if by else ''}({function}({series(name, extra)}[{interval}]))"


def mean(name: str, interval: str = INTERVAL) -> str:
    """Return the mean of a histogram."""
    return f"{total(f'{name}_sum', interval=interval)} / {total(f'{name}_count', interval=interval)}"


def quantile(share: float, name: str) -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({share}, {total(f'{name}_bucket', 'le')})"


def per_second(name: str) -> str:
    """Return a counter of the sampled attention calls over their time."""
    labels = "backend, phase"
    return f"{total(name, labels)} / {total('attention_seconds_sum', labels)}"


def limit(colors: tuple[str, str], value: float) -> tuple[tuple[str, float | None], ...]:
    """Return colors before and from a limit."""
    return ((colors[0], None), (colors[1], value))


SELECTION, ATTENTION = total("selection_seconds_sum"), total("attention_seconds_sum")
SPARSE_PROMPTS = total("requests_total", extra='route="sparse"')
TEXT = (("text", None),)
ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel("Prompts", "reqps", {"": total("requests_total")}, "stat", 4, limits=TEXT),
        Panel("Share that runs sparse", "percentunit", {"": f"{SPARSE_PROMPTS} / {total('requests_total')}"}, "stat", 4,
              limits=TEXT),
        Panel("Density", "percentunit", {"": mean("density_ratio", "30m")}, "stat", 4, limits=TEXT),
        Panel("Recall", "percentunit", {"": mean("recall_ratio", "30m")}, "stat", 4, limits=limit(BELOW, RECALL_LOW)),
        Panel("Guard", "short", {"": f"max({series('guard_level')})"}, "stat", 4,
              limits=(("green", None), ("orange", 1), ("red", 3)),
              texts={"0": "quiet", "1": "warns", "2": "widened", "3": "dense"}),
        Panel("Kill switch", "short", {"": f"max({series('kill_switch')})"}, "stat", 4,
              limits=limit(("green", "orange"), 1), texts={"0": "off", "1": "on"}),
    ),
    "Traffic": (
        Panel("Prompts by route", "reqps", {"{{route}}": total("requests_total", "route")}, "stacked"),
        Panel("Prompt tokens by route, per second", "short", {"{{route}}": total("tokens_total", "route")}, "stacked"),
        Panel("Prefill time", "s", {f"p{share * 100:g}": quantile(share, "request_seconds")
                                    for share in (0.5, 0.95, 0.99)}),
    ),
    "What ran": (
        Panel("Attention calls by backend", "ops",
              {"{{backend}}, {{phase}}": total("layer_calls_total", "backend, phase")}, "stacked"),
        Panel("Dense calls by reason", "ops", {"{{reason}}": total("dense_calls_total", "reason")}, "stacked"),
        Panel("Fallbacks by reason", "ops", {"{{reason}}": total("fallbacks_total", "reason")}, "stacked"),
        Panel("Density", "percentunit",
              {"mean": mean("density_ratio"), "p95": quantile(0.95, "density_ratio")}, minimum=0),
        Panel("Density by layer", "percentunit",
              {"layer {{layer}}": f"avg by (layer) ({series('layer_density_ratio')})"}, minimum=0),
        Panel("Overlap of neighbouring selections", "percentunit", {"shared over all blocks": mean("overlap_ratio")},
              minimum=0, maximum=1),
    ),
    "How fast": (
        Panel("Time of an attention call", "s",
              {"p50": quantile(0.5, "attention_seconds"), "p95": quantile(0.95, "attention_seconds"),
               "mean": mean("attention_seconds")}, width=6),
        Panel("Achieved FLOP/s", "flops", {"{{backend}}, {{phase}}": per_second("attention_flops_total")}, width=6),
        Panel("Achieved bandwidth", "Bps", {"{{backend}}, {{phase}}": per_second("attention_bytes_total")}, width=6),
        Panel("Selection's share of attention time", "percentunit",
              {"share": f"{SELECTION} / ({SELECTION} + {ATTENTION})"}, width=6, minimum=0),
    ),
    "How faithful": (
        Panel("Recall", "percentunit", {"mean": mean("recall_ratio"), "p5": quantile(0.05, "recall_ratio")}, width=6,
              maximum=1, limits=limit(BELOW, RECALL_LOW)),
        Panel("Recall by layer, lowest ten", "percentunit",
              {"layer {{layer}}": f"bottomk(10, min by (layer) ({series('layer_recall_ratio')}))"}, width=6,
              maximum=1, limits=limit(BELOW, RECALL_LOW)),
        Panel("Output error", "percentunit",
              {"mean": mean("output_error_ratio"), "p95": quantile(0.95, "output_error_ratio"),
               "worst layer": f"max({series('layer_output_error_ratio')})"}, width=6,
              minimum=0, limits=limit(ABOVE, ERROR_HIGH)),
        Panel("Next-token divergence", "short", {"mean, nats": mean("next_token_kl_nats")}, width=6, minimum=0),
        Panel("Drift by layer, worst ten", "short",
              {"layer {{layer}}": f"topk(10, max by (layer) ({series('layer_drift_ratio')}))"},
              minimum=0, limits=limit(ABOVE, DRIFTED)),
        Panel("Guard checks", "ops", {"{{verdict}}": total("guard_checks_total", "verdict")}, "stacked"),
        Panel("Key-value cache", "bytes", {"{{model_name}}": f"sum by (model_name) ({series('kv_cache_bytes')})"},
              minimum=0),
    ),
    "In force": (
        Panel("Policy", "short", {"": f"{series('policy_info')} == 1"}, "table"),
        Panel("Rollout, stale policy, reloads", "short",
              {"rollout": f"max({series('rollout_ratio')})", "stale": f"max({series('policy_stale')})",
               "reloads {{result}}": total("policy_reloads_total", "result", function="increase")}, minimum=0),
        Panel("Events", "short",
              {"{{event}}": total("events_total", "event", function="increase"),
               "telemetry: {{what}}": f"sum by (what) (increase(dynaxx_telemetry_errors_total[{INTERVAL}]))"},
              "bars", minimum=0),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard as plain data.

    Raises:
        KeyError: a panel shows a metric that the catalog does not have.
    """
    events = f"{total('events_total', 'event', function='increase', interval='1m')} > 0"
    return {
        "title": "dynaxx",
        "uid": "dynaxx",
        "description": "Sparse attention: what ran, how fast, how faithful.",
        "tags": ["dynaxx", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {
            "list": [  # newer versions of Grafana read `target`, older ones `expr`
                {"name": "Events", "enable": True, "iconColor": "purple", "datasource": SOURCE, "expr": events,
                 "target": {"refId": "Anno", "expr": events}, "titleFormat": "{{event}}"}
            ]
        },
        "links": [],
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus",
                 "hide": 0},
                _variable("model_name", "model", "label_values(dynaxx_layer_calls_total, model_name)"),
                _variable("engine", "engine", f"label_values({CALLS_OF_MODELS}, engine)"),
            ]
        },
        "panels": _placed(ROWS),
    }  # fmt: skip


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a choice of one label's values, all by default."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the time range changes
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def _placed(rows: Mapping[str, tuple[Panel, ...]]) -> list[dict[str, Any]]:
    """Return all panels with their places: from left to right, in lines, under the titles of rows."""
    placed: list[dict[str, Any]] = []
    top = 0
    for title, panels in rows.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        placed.append({"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        left, top, height = 0, top + 1, 4 if panels[0].form == "stat" else 8
        for panel in panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + height
            place = {"h": height, "w": panel.width, "x": left, "y": top}
            placed.append(_drawn(panel) | {"gridPos": place})
            left += panel.width
        top += height
    return [{"id": number} | panel for number, panel in enumerate(placed, 1)]


def _drawn(panel: Panel) -> dict[str, Any]:
    """Return a panel in Grafana's words, without its place."""
    kind = panel.form if panel.form in ("stat", "table") else "timeseries"
    mode = {"mode": "thresholds" if kind == "stat" else "palette-classic"}
    steps = [{"color": color, "value": value} for color, value in panel.limits]
    defaults: dict[str, Any] = {"unit": panel.unit, "color": mode, "thresholds": {"mode": "absolute", "steps": steps}}
    defaults |= {name: value for name, value in (("min", panel.minimum), ("max", panel.maximum)) if value is not None}
    if panel.texts:
        defaults["mappings"] = [
            {"type": "value", "options": {key: {"text": text} for key, text in panel.texts.items()}}
        ]
    drawn: dict[str, Any] = {"options": STAT_OPTIONS}
    query: dict[str, Any] = {"range": True}
    if kind == "table":
        drawn = {"options": {"showHeader": True}, "transformations": [TABLE_TRANSFORMATION]}
        query = {"range": False, "instant": True, "format": "table"}
    elif kind == "timeseries":
        drawn, defaults["custom"] = {"options": GRAPH_OPTIONS}, _style(panel)
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend, **query}
        for index, (legend, expression) in enumerate(panel.queries.items())
    ]
    named = re.findall(r"dynaxx_(\w+)", " ".join(panel.queries.values()))
    metrics = dict.fromkeys(f"dynaxx_{re.sub('_(bucket|sum|count)$', '', name)}" for name in named)
    return {
        "type": kind,
        "title": panel.title,
        "description": "\n\n".join(f"`{name}`: {CATALOG[name].help}" for name in metrics),
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        **drawn,
    }


def _style(panel: Panel) -> dict[str, Any]:
    """Return how a time series is drawn."""
    style: dict[str, Any] = {
        "drawStyle": "bars" if panel.form == "bars" else "line",
        "fillOpacity": 8 if panel.form == "lines" else 30,
        "showPoints": "never",
    }
    if panel.form != "lines":
        style["stacking"] = {"mode": "normal", "group": "A"}
    if len(panel.limits) > 1:
        style["thresholdsStyle"] = {"mode": "dashed"}
    return style


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
