# SPDX-License-Identifier: Apache-2.0
"""Targets of the GPU suite on an H200: ratios to peers in the same process, rates, and times."""

from __future__ import annotations

from typing import Any

from dynaxx.lab.bench.targets import Target

FLEX, FLEX_PORTABLE = 1.45, 1.15
PER_FA4 = {  # forward, backward
    "random 10 %": (1.05, 1.0),
    "random 30 %": (1.0, 1.0),
    "random 20 % of 8k": (1.1, 1.0),
    "window 1024": (1.1, 1.05),
    "window 4096": (1.0, 1.0),
    **{f"group {size}, {share}": (1.0, 1.05) for size in (7, 8) for share in ("15 % of 24k", "20 % of 8k")},
}
TFLOPS = {"blocks of 64": 420, "blocks of 64, 128k": 420, "density 1.0": 0.92 * 671}  # rate of FlashAttention 3, dense
OF_MAIN = {"head_dim 64": 0.8, "head_dim 256": 0.8, "group 1": 0.8, "group 7": 0.8, "group 8": 0.8}
OF_EQUAL = 0.9
CACHED_MS, FRESH_MS, HOST_US = 0.05, 0.5, 40.0
ENCODER = {"time": 0.37, "memory": 0.38}  # share of eager attention's time and memory


def targets_of(found: dict[str, Any]) -> list[Target]:
    """Return every target whose row was asked for."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        rows.setdefault(row["workload"], {})[row["implementation"]] = row
    best = {name: _best(each) for name, each in rows.items()}
    targets = []
    for name, row in best.items():
        kinds = ("forward", "backward")
        for kind, target in zip(kinds, PER_FA4.get(name, ()), strict=False):
            targets.append(Target(f"{kind}, times FA4", target, _ratio(row, "fa4", kind), name))
            if "random" in name:
                targets.append(Target(f"{kind}, times FlexAttention", FLEX, _ratio(row, "flex", kind), name))
        if name in TFLOPS:
            targets.append(Target("forward, TF/s", TFLOPS[name], row.get("forward_tflops"), name))
        for kind in kinds:
            if name in OF_MAIN:
                targets.append(Target(f"{kind}, share of the main shape's TF/s", OF_MAIN[name],
                                _share(row, best.get("random 10 %", {}), kind), name))  # fmt: skip
            if name == "ragged":
                targets.append(Target(f"{kind}, share of an equal batch's TF/s", OF_EQUAL,
                                _share(row, best.get("equal", {}), kind), name))  # fmt: skip
            if "flex" in rows[name]:
                ratio = _ratio(rows[name]["triton"], "flex", kind)
                targets.append(Target(f"{kind}, the portable kernels, times FlexAttention", FLEX_PORTABLE, ratio, name))
    for row in found.get("layouts", ()):
        targets.append(Target("layout, cached, ms", CACHED_MS, row["cached_ms"], row["pattern"], at_most=True))
        targets.append(Target("layout, fresh, ms", FRESH_MS, row["fresh_ms"], row["pattern"], at_most=True))
    for row in found.get("host", ()):
        targets.append(Target("host time of a call, us", HOST_US, row["us"], row["call"], at_most=True))
    if "encoder" in found:
        encoder = {row["attention"]: row for row in found["encoder"]}
        ours, eager, sdpa = encoder["dynaxx"], encoder["eager"], encoder["sdpa"]
        targets.append(
            Target("encoder, time of eager's", ENCODER["time"], ours["ms"] / eager["ms"], "BERT", at_most=True)
        )
        targets.append(
            Target(
                "encoder, peak memory of eager's", ENCODER["memory"], ours["mib"] / eager["mib"], "BERT", at_most=True
            )
        )
        targets.append(Target("encoder, times faster than SDPA", 1.0, sdpa["ms"] / ours["ms"], "BERT"))
    return targets


def _best(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the backend that `backend="auto"` would run."""
    return next((rows[name] for name in ("hopper", "triton") if "skipped" not in rows[name]), {})


def _ratio(row: dict[str, Any], peer: str, kind: str) -> float | None:
    value: float | None = row.get("ratio", {}).get(peer, {}).get(kind)
    return value


def _share(row: dict[str, Any], of: dict[str, Any], kind: str) -> float | None:
    name = f"{kind}_tflops"
    return row[name] / of[name] if name in row and name in of else None
