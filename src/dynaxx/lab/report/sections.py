# SPDX-License-Identifier: Apache-2.0
"""Turn the documents of the tools into the figures, tables and charts of the report.

Each function takes its document and all documents. It raises if a field is missing or malformed.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from dynaxx.lab.kinds import label
from dynaxx.lab.report import charts
from dynaxx.lab.report.charts import Axes, ChartLine, Line, Point
from dynaxx.lab.report.svg import TOKENS, heatmap_uri, pattern_pictures
from dynaxx.lab.report.verdict import change, duration, is_busy, limit, percent, times
from dynaxx.lab.validate.check import decimals

RULE_NAMES = {
    "oracle": "best possible",
    "streaming": "sinks, window",
    "mean_pool": "mean-pooled",
    "min_max": "min/max bound",
    "mean_query": "mean query",
    "last_query_probe": "last-query probe",  # of earlier analyses
}
NARROW_LAYERS = 8  # layers of the budget chart that a narrow screen shows
MAX_MAPS = 400  # number of heads above which heat maps are reduced, to keep the page small


def number(value: Any) -> str:
    """Format a figure of unknown kind to four digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def profile_section(document: dict[str, Any], documents: dict[str, Any]) -> dict[str, Any]:
    """Return the section on where the time goes."""
    lengths = sorted(document["lengths"], key=lambda length: length["seqlen"])
    rows = []
    for length in lengths:
        seconds = dict(length["seconds"])
        seconds["rest"] += seconds.get("windowed", 0.0)  # the verdict says how much
        parts = [
            (f"{words}: {duration(seconds[part])}, {percent(seconds[part] / seconds['total'])}", seconds[part])
            for part, words in PARTS.items()
        ]
        shares = [(title, value / seconds["total"]) for title, value in parts]
        rows.append((f"{length['seqlen']:,}", shares, duration(seconds["total"])))
    chart = charts.stacked_bars(
        rows,
        alt="Share of prefill time by prompt length: attention, projections, MLP, rest",
        labels=[f"attention {percent(length['attention_share'])}" for length in lengths],
    )
    return {
        "verdict": document["verdict"],
        "busy": is_busy(document),
        "left_out": [f"{length:,}" for length in document.get("left_out") or ()],
        "chart": chart,
        "lengths": lengths,
        "ceilings": document["ceilings"],
    }


PARTS = {
    "attention": "attention",
    "projections": "projections",
    "mlp": "MLP",
    "rest": "rest",
}


def analysis_section(document: dict[str, Any], documents: dict[str, Any]) -> dict[str, Any]:
    """Return the section on where the heads attend."""
    heads = document["heads"]
    layers: dict[int, list[dict[str, Any]]] = {}
    for head in heads:
        layers.setdefault(head["layer"], []).append(_head(head, shrink=len(heads) > MAX_MAPS))
    return {
        "tokens": document["tokens"],
        "rows": document.get("rows", document["tokens"]),
        "block_size": document["block_size"],
        "summary": document["summary"],
        "layers": layers,
        "columns": min(16, max(len(each) for each in layers.values())),
        "chart": _recall_chart(document),
        "rules": {name: RULE_NAMES.get(name, name) for name in document["rules"]},
    }


def _head(head: dict[str, Any], shrink: bool) -> dict[str, Any]:
    heatmap, recommended = head["heatmap"], head["recommended"]
    codes, size = base64.b64decode(heatmap["data"], validate=True), int(heatmap["size"])
    if len(codes) != size * size:
        raise ValueError(f"a heat map has {len(codes)} bytes, not {size} x {size}")
    if shrink and size > 32:
        codes, size = _halved(codes, size), size // 2
    title = (
        f"layer {head['layer']}, head {head['head']}: {recommended['reason']}. First tokens "
        f"{percent(head['sink_mass'])}, near {percent(head['local_mass'])}, vertical lines "
        f"{percent(head['vertical_mass'])}, slash lines {percent(head['slash_mass'])}"
    )
    return {**head, "uri": heatmap_uri(codes, size), "title": title}


def _halved(codes: bytes, size: int) -> bytes:
    """Halve rows and columns, taking the larger of each two neighbours."""
    half = size // 2
    best = bytearray(half * half)
    for y in range(half * 2):
        for x in range(half * 2):
            at = y // 2 * half + x // 2
            best[at] = max(best[at], codes[y * size + x])
    return bytes(best)


def _recall_chart(document: dict[str, Any]) -> str:
    rules = document["rules"]
    best = max((name for name in rules if name != "oracle"), key=lambda name: sum(rules[name]["recall"]))
    styles = {"oracle": "dashed", best: "accent"}
    series = []
    for name, rule in sorted(rules.items(), key=lambda rule: rule[0] == best):  # draw the best last, on top
        words = RULE_NAMES.get(name, name)
        points = [
            Point(100 * density, 100 * recall, f"{words}: {percent(recall, 1)} at {percent(density, 1)} density")
            for density, recall in zip(rule["density"], rule["recall"], strict=True)
        ]
        series.append(ChartLine(words, points, styles.get(name, "soft")))
    axes = Axes("density, %", "mass caught, %, mean over heads", _plain, _plain, height=280)
    return charts.line_chart(series, axes, alt="Attention mass that each rule catches, by density")


def tuning_section(document: dict[str, Any], documents: dict[str, Any]) -> dict[str, Any]:
    """Return quality against density, budgets, and attention alone against dense."""
    chosen, timings = document["chosen"], document["crossover"] if document["verdict"] != "undecided" else []
    return {
        **document,
        "digits": decimals(100 * document["tolerance"], 2),
        "busy": is_busy(document),
        "trials": [
            {
                **trial,
                "kind": kind,
                "is_chosen": kind == "tuned" and trial == chosen,
                "result": "passed" if trial["passed"] else "failed" if trial.get("decided", True) else "undecided",
            }
            for kind in ("tuned", "uniform")
            for trial in document[kind]
        ],
        "kinds": _tuned_kinds_table(document),
        "quality": _quality_chart(document),
        "crossover": _speed_chart(
            timings,
            "attention",
            "Speed of attention alone against dense, by prompt length",
            document.get("sparse_from", document.get("dense_below")),  # older files have the second alone
            "sparse from",
        ),
        "budgets": _budget_matrix(document) if document.get("budgets") and chosen else "",
        "many_layers": len(document.get("budgets") or ()) > NARROW_LAYERS,
    }


def _tuned_kinds_table(document: dict[str, Any]) -> dict[str, Any]:
    """Return the chosen budgets on each kind of text, and budgets that were tuned without that kind."""
    chosen = {row["kind"]: row for row in (document["chosen"] or {}).get("kinds") or []}
    held_out = {row["kind"]: row for row in document.get("held_out") or []}
    header = ["kind of text", "change", "standard error"]
    if held_out:
        header += ["tuned without it: change", "standard error", "blocks"]

    def of(row: dict[str, Any] | None) -> list[str]:
        if row is None or row["ratio"] is None:
            return ["not measured", ""]
        return [change(row["ratio"]), percent(row["error"], 2)]

    rows = []
    for kind in chosen | held_out:
        cells = [label(kind), *of(chosen.get(kind))]
        if held_out:
            density = held_out.get(kind, {}).get("density")
            cells += [*of(held_out.get(kind)), "" if density is None else percent(density, 1)]
        rows.append(cells)
    return {"header": header, "rows": rows}


def _quality_chart(document: dict[str, Any]) -> str:
    tolerance, chosen = document["tolerance"], document["chosen"]
    shown = max(tolerance, 0.002)  # a tolerance of 0 has no scale
    series = []
    for kind, name, style in (("uniform", "uniform", "soft"), ("tuned", "tuned", "accent")):
        points = [
            Point(
                100 * trial["density"],
                100 * (trial["ratio"] - 1),
                f"{name}: {percent(trial['density'], 1)} density, perplexity {change(trial['ratio'])}",
                ringed=kind == "tuned" and trial == chosen,
            )
            for trial in document[kind]
        ]
        series.append(ChartLine(name, points, style))
    if not any(each.points for each in series):
        return ""
    changes = [point.y for each in series for point in each.points]
    top = min(max(*changes, 200 * shown), 600 * shown)
    axes = Axes(
        "density, % of blocks visited",
        "perplexity, % above dense",
        _plain,
        _plain,
        y_range=(min(0.0, *changes) - 0.04 * top, top * 1.05),
        y_lines=(Line(100 * tolerance, f"limit {limit(tolerance)}"),),
    )
    return charts.line_chart(series, axes, alt="Perplexity against density, tuned and uniform budgets")


def _speed_chart(timings: list[dict[str, Any]], name: str, alt: str, border: int | None, words: str) -> str:
    """Draw dense over sparse seconds by length. `words` and `border` mark a border of the policy."""
    if not timings:
        return ""
    points = []
    for timing in sorted(timings, key=lambda timing: timing["seqlen"]):
        speedup = timing["dense_seconds"] / timing["sparse_seconds"]
        seconds = f"{duration(timing['dense_seconds'])} dense, {duration(timing['sparse_seconds'])} sparse"
        seconds += ", machine busy" if timing.get("busy") else ""
        points.append(Point(timing["seqlen"], speedup, f"{timing['seqlen']:,} tokens: {times(speedup)}, {seconds}"))
    inside = border and points[0].x < border < points[-1].x
    axes = Axes(
        "prompt length, tokens",
        "speed, dense = 1",
        lambda x: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}",
        _plain,
        log_x=True,
        y_range=(0.0, 1.1 * max(1.0, *(point.y for point in points))),
        y_lines=(Line(1.0, "dense"),),
        x_lines=(Line(border, f"{words} {border:,}"),) if border and inside else (),
    )
    return charts.line_chart([ChartLine(name, points, "accent")], axes, alt=alt)


def _budget_matrix(document: dict[str, Any]) -> str:
    budgets = document["budgets"]
    layers = document.get("layers") or list(range(len(budgets)))
    titles = [
        [f"layer {layer}, head {head}: budget {percent(value)}" for head, value in enumerate(row)]
        for layer, row in zip(layers, budgets, strict=True)
    ]
    names = [str(layer) for layer in layers]
    alt = f"Budget per head, {len(budgets)} layers"
    return charts.matrix(budgets, titles, alt=alt, names=names, x_label="layer", y_label="head")


def policy_section(document: dict[str, Any], documents: dict[str, Any]) -> dict[str, Any]:
    """Return the policy, its size, and pictures of its patterns."""
    return {
        "rules": len(document["rules"]),
        "sparse_prompts": any(rule.get("phase", "prefill") == "prefill" for rule in document["rules"]),
        "model": document["model"],
        "border": document.get("sparse_from") or document.get("dense_below"),
        "tolerances": {name: value for name, value in document["tolerances"].items() if value is not None},
        "text": json.dumps(document, indent=2, ensure_ascii=False),
        "pictures": pattern_pictures(document),
        "picture_tokens": TOKENS,
    }


def validation_section(document: dict[str, Any], documents: dict[str, Any]) -> dict[str, Any]:
    """Return the checks, the tasks, and the whole prefill against dense."""
    speed = sorted(document["speed"], key=lambda row: row["seqlen"])
    details = {name: document[name] for name in ("logits", "perplexity", "repetition") if document.get(name)}
    policy = documents.get("policy") or {}
    return {
        "passed": bool(document["passed"]),
        "tokens": document["window_tokens"],
        "text_differs": document["about"].get("text") != ((documents.get("tuning") or document)["about"].get("text")),
        "checks": [{**check, "unclear": check.get("unclear")} for check in document["checks"]],
        "speed": speed,
        "busy": document["busy"],
        "chart": _speed_chart(
            speed,
            "prefill",
            "Speed of the whole prefill against dense, by prompt length",
            policy.get("sparse_from"),
            "sparse from",
        ),
        "with_memory": any(row.get("dense_peak_mb") for row in speed),
        "with_cpu": any(row.get("dense_cpu_seconds") for row in speed),
        "tasks": _table(document.get("tasks")),
        "kinds": _kinds_table(document.get("kinds")),
        "suite": _suite_table(document.get("suite")),
        "details": {name: _flat(value) for name, value in details.items()},
    }


def _kinds_table(rows: Any) -> dict[str, Any]:
    """Return perplexity by kind of text as header and rows."""
    shown = [
        [row["label"], row["tokens"], row["dense"], change(row["ratio"]), percent(row["error"], 2)]
        for row in rows or []
    ]
    return {"header": ["kind", "tokens", "dense perplexity", "change", "standard error"], "rows": shown}


def _suite_table(suite: Any) -> dict[str, Any]:
    """Return long-context tasks as header and rows."""
    shown = [
        [
            f"{row['task']}, {row['tokens']:,} tokens",
            percent(row["dense_match"]["mean"]),
            percent(row["sparse_match"]["mean"]),
            row["drop"]["mean"],
            row["drop"]["high"] if row["drop"]["high"] is not None else "",
            row["verdict"],
        ]
        for row in (suite or {}).get("rows", ())
    ]
    return {"header": ["task", "dense finds", "sparse finds", "nats lost", "at most", "verdict"], "rows": shown}


def _table(rows: Any) -> dict[str, Any]:
    """Turn a list of similar objects into header and rows, without nested values."""
    rows = [row for row in rows or [] if isinstance(row, dict)]
    header = [key for key, value in rows[0].items() if not isinstance(value, (dict, list))] if rows else []
    return {"header": header, "rows": [[row.get(key, "") for key in header] for row in rows]}


def _flat(value: Any) -> dict[str, Any]:
    """Return the plain figures of an object."""
    if not isinstance(value, dict):
        return {"value": value}
    return {key: each for key, each in value.items() if not isinstance(each, (dict, list))}


def machine_facts(documents: dict[str, Any]) -> dict[str, str]:
    """Return facts about the machine, from the profile or else from the policy."""
    facts = (documents.get("profile") or {}).get("machine") or (documents.get("policy") or {}).get("measured_on") or {}
    said = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {each}" for key, each in value.items())
        elif isinstance(value, list):
            value = ", ".join(str(each) for each in value)
        if value not in ("", None):
            label, unit = ("memory", " GiB") if name == "memory_gib" else (name.replace("_", " "), "")
            said[label] = number(value) + unit
    return said


def _plain(value: float) -> str:
    return f"{value:g}"
