# SPDX-License-Identifier: Apache-2.0
"""Make the rows of `tasks.py`: one per task and method, or methods side by side."""

import json
from pathlib import Path

from dynaxx.lab.tasks.suite import DEFINITIONS

SHORT = {
    "window and sink": "window, sink",
    "vertical and slash lines of the last queries (MInference)": "MInference-like",
    "anti-diagonals (XAttention)": "XAttention-like",
    "bounds of keys (Quest)": "Quest-like",
}
MARKS = {"holds": " ✓", "fails": " ✗"}


def interval_text(found):
    """Return the text of a stored interval, or nothing for None."""
    return "" if found is None else f"{found['mean']:+.2f} ± {(found['high'] - found['low']) / 2:.2f}"


def flat(method, density, row):
    """Return one row of the table."""
    drop = row["drop"]
    return {
        "task": row["task"],
        "tokens": row["tokens"],
        "samples": row["samples"],
        "method": method,
        "density": f"{density:.1%}",
        "dense finds": f"{row['dense_match']['mean']:.0%}",
        "right answers above others": interval_text(row.get("preference")),
        "finds": f"{row['sparse_match']['mean']:.0%}",
        "nats lost per answer token": f"{drop['mean']:+.2f}",
        "95 % interval": f"{drop['low']:+.2f} to {drop['high']:+.2f}",
        "verdict": row["verdict"],
    }


def stored_rows(paths):
    """Return the rows of stored results, each once."""
    found, known = [], set()
    for path in paths:
        results = json.loads(path.read_text("utf-8"))["results"]
        for key in results:
            task, _, method = key.partition(" ")
            name, _, density = method.rpartition("|")
            if key in known or not name:
                continue
            known.add(key)
            if task in DEFINITIONS:
                found.append(flat(name, float(density), results[key]))
            elif task == "perplexity":
                rise = " ".join(f"{each:+.1%}" for each in results[key])
                found.append({"task": task, "method": name, "density": f"{float(density):.1%}", "rise": rise})
    return found


def by_text(rows, texts):
    """Return one row per method and density with the rise of perplexity on each text as a column."""
    names = [Path(each).stem for each in texts]
    shown = [row for row in rows if row["task"] == "perplexity"]
    return [
        {"method": row["method"], "blocks": row["density"], **dict(zip(names, row["rise"].split(), strict=True))}
        for row in shown
    ]


def side_by_side(rows, densities):
    """Return one row per density and task. A cell is what a method finds, and the nats that it loses per token.

    Rows with the task "perplexity" have the rise of perplexity on each text instead, and rows with the task "all" the
    number of tasks that hold, are unclear and fail.
    """
    found, verdicts = {}, {}
    for row in rows:
        density = min(densities, key=lambda each: abs(each - float(row["density"].rstrip("%")) / 100))
        new = lambda name, density=density: found.setdefault(
            (density, name), {"blocks": f"{density:.0%}", "task": name}
        )
        method, task = SHORT.get(row["method"], row["method"]), new(row["task"])
        if row["task"] == "perplexity":
            task[method] = row["rise"]
            continue
        task["dense"] = row["dense finds"]
        low, high = map(float, row["95 % interval"].split(" to "))
        cell = f"{row['finds']}, {row['nats lost per answer token']} ± {(high - low) / 2:.2f}"
        task[method] = cell + MARKS.get(row["verdict"], "" if row["verdict"] == "unclear" else f" {row['verdict']}")
        verdicts.setdefault((density, method), []).append(row["verdict"])
        counts = [verdicts[density, method].count(each) for each in ("holds", "unclear", "fails")]
        new("all")[method] = "{} hold, {} unclear, {} fail".format(*counts)
    order = {name: index for index, name in enumerate(("all", "perplexity", *DEFINITIONS))}
    methods = dict.fromkeys(name for row in found.values() for name in row if name not in ("blocks", "task", "dense"))
    shown = sorted(methods, key=lambda name: (not name.startswith("tuned"), name))
    ordered = sorted(found.items(), key=lambda each: (each[0][0], order[each[0][1]]))
    return [{name: row.get(name, "") for name in ("blocks", "task", "dense", *shown)} for _, row in ordered]
