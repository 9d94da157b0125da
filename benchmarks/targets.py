# SPDX-License-Identifier: Apache-2.0
"""Hold the figures of `dynaxx bench` and of gpu_beside.py against this project's targets.

    python -m benchmarks.suites cpu --threads 1 --out cpu.json
    python benchmarks/targets.py cpu.json        # exit code 1 if a figure misses its target

Targets of the CPU suite hold on an AVX-512 server, those of the GPU suite on an H200.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Target:
    """A threshold: `value` must be at least (for errors and times at most) `target`.

    A value of None could not be measured, as when the peer it is held against is not installed: neither met nor missed.
    """

    name: str
    target: float
    value: float | None
    workload: str
    at_most: bool = False

    @property
    def ok(self) -> bool | None:
        """Return whether the target is met; None if nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"name": self.name, "workload": self.workload, "target": self.target, "value": self.value, "ok": self.ok}

    def __str__(self) -> str:
        """Return a line with the verdict, the measured value and the threshold."""
        said = {True: "ok  ", False: "MISS", None: "?   "}[self.ok]
        sign = "<=" if self.at_most else ">="
        value = "not measured" if self.value is None else f"{self.value:.4g}"
        return f"{said} {self.name} [{self.workload}]: {value} {sign} {self.target:g}"


def targets_of(found: dict[str, Any]) -> list[Target]:
    """Return the targets of a suite's JSON; a suite without rows of its own has none."""
    if "decode" in found and "half" in found:
        return cpu_targets(found)
    ours = "encoder" in found or "layouts" in found or "checks" in found
    return gpu_targets(found) if ours else []


def cpu_targets(found: dict[str, Any]) -> list[Target]:
    """Return every target of the CPU suite whose row was asked for."""
    return _shapes(found["rows"]) + _small(found["small"]) + _half(found["half"]) + _decode(found["decode"])


def _shapes(rows: Iterable[dict[str, Any]]) -> list[Target]:
    """Return the targets for the rows of `time_shape`. Rows with tokens first in memory have none."""
    targets = []
    for row in rows:
        if row["memory"] != "heads first":
            continue
        name, forward = row["workload"], row["pass"] == "forward"
        where = f"{name}, {row['seqlen']} x {row['head_dim']}"
        main = name in ("window 512", "window 1024", "random 10 %, blocks 64")
        if main and forward:
            targets.append(Target("forward, useful GF of matmul", 0.70, row["of_gemm"], where))
            targets.append(Target("forward, useful GF of SDPA", 0.90, row["of_sdpa"], where))
        elif main:
            targets.append(Target("backward, useful GF of matmul", 0.70, row["of_gemm"], where))
        if forward and name in ("window 256", "random 10 %, blocks 32"):
            targets.append(Target("forward, small windows and blocks, of matmul", 0.60, row["of_gemm"], where))
        if name == "random 10 %, blocks 64":
            targets.append(Target(f"{row['pass']}, times faster at 10 %", 9.0, row["times_faster"], where))
        if forward and name == "window 512" and row["seqlen"] == 8192:
            targets.append(Target("forward, times faster at window 512", 8.5, row["times_faster"], where))
        if forward and name == "full density":
            targets.append(Target("forward, times faster at full density", 1.1, row["times_faster"], where))
    return targets


def _small(rows: Iterable[dict[str, Any]]) -> list[Target]:
    """Return the targets of short lengths: never slower than dense attention."""
    return [Target("times faster at any length", 1.0, row["times_faster"], f"{row['seqlen']} tokens") for row in rows]


def _half(rows: Iterable[dict[str, Any]]) -> list[Target]:
    """Return the targets of half precision: bf16 and fp16 cost no more than fp32."""
    return [
        Target("speed as a share of fp32's", 0.9, row["of_fp32"], f"{row['pass']}, {row['dtype']} x {row['head_dim']}")
        for row in rows
    ]


def _decode(rows: Iterable[dict[str, Any]]) -> list[Target]:
    """Return the targets of pages of 64; pages of 16 have none."""
    return [
        Target("decode, times faster at 10 %", 9.0, row["times_faster"], f"{row['seqlen']} keys, pages of 64")
        for row in rows
        if row["page_size"] == 64
    ]


def gpu_targets(found: dict[str, Any]) -> list[Target]:
    """Return every target whose row was asked for."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found.get("rows", ()):
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
    names = [name for name in ("auto", "hopper", "triton") if name in rows]
    return next((rows[name] for name in names if "skipped" not in rows[name]), {})


def _ratio(row: dict[str, Any], peer: str, kind: str) -> float | None:
    value: float | None = row.get("ratio", {}).get(peer, {}).get(kind)
    return value


def _share(row: dict[str, Any], of: dict[str, Any], kind: str) -> float | None:
    name = f"{kind}_tflops"
    return row[name] / of[name] if name in row and name in of else None


def main() -> int:
    """Print the targets of each file; return the exit status."""
    targets = [each for path in sys.argv[1:] for each in targets_of(json.loads(Path(path).read_text()))]
    print(*targets, sep="\n")
    return int(any(target.ok is False for target in targets))


if __name__ == "__main__":
    sys.exit(main())
