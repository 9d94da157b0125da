# SPDX-License-Identifier: Apache-2.0
"""List what was run where: versions of packages that benchmarks and tests ran with, read from their records.

Result files are in `benchmarks/results`, see `record.py`; `pytest --record benchmarks/runs/NAME.json` adds a run of
tests. `render.py` puts the tables and the versions into pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
PACKAGES = ("vllm", "vllm-omni", "torch", "triton", "transformers", "python", "CUDA driver")


class Run(NamedTuple):
    """One version of a package in one record."""

    package: str
    release: tuple[int, ...]  # (major, minor)
    devices: tuple[str, ...]  # "NVIDIA H100", "CPU", ...
    date: str
    passed: int  # tests; 0 for a benchmark
    failed: int

    @property
    def version(self) -> str:
        """Return the version in words."""
        return ".".join(map(str, self.release))


def records() -> Iterator[dict[str, Any]]:
    """Yield every record that is a measurement or a run of tests."""
    for folder in ("results", "runs"):
        for path in sorted((FOLDER / folder).glob("*.json")):
            yield json.loads(path.read_text(encoding="utf-8"))


def runs() -> list[Run]:
    """Return what ran, package by package, newest release first."""
    found = []
    for record in records():
        devices = devices_of(record["device"])
        counts = record.get("passed", 0), record.get("failed", 0) + record.get("error", 0)
        for package in PACKAGES:
            for release in dict.fromkeys(re.findall(r"(\d+)\.(\d+)", record["versions"].get(package, ""))):
                numbers = tuple(map(int, release))
                found.append(Run(package, numbers, devices, record["date"], *counts))
    order = lambda run: (PACKAGES.index(run.package), tuple(-number for number in run.release))
    return sorted(found, key=order)


def devices_of(device: str) -> tuple[str, ...]:
    """Return the kinds of devices that a record names: GPUs, or else a CPU."""
    gpus = re.findall(r"NVIDIA H\d+|AMD Instinct \w+|NVIDIA \w+", device)
    gpus += [f"NVIDIA {name}" for name in re.findall(r"and (H\d+)", device)]
    return tuple(dict.fromkeys(gpus)) or ("CPU",)


def versions(package: str, place: str) -> str:
    """Return the releases of a package that ran on "GPU" or "CPU", oldest first, such as "0.26 and 0.32".

    Raises:
        ValueError: none ran there.
    """
    ran = [run for run in runs() if run.package == package and (run.devices == ("CPU",)) == (place == "CPU")]
    names = [".".join(map(str, release)) for release in sorted({run.release for run in ran})]
    if not names:
        raise ValueError(f"no record says that {package} ran on a {place}")
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def rows() -> list[list[str]]:
    """Return a row for each package and release: where it ran, benchmarks and tests, and the last date."""
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in runs():
        grouped.setdefault((run.package, run.version), []).append(run)
    found = []
    for (package, version), ran in grouped.items():
        devices = sorted({device for run in ran for device in run.devices})
        tests = [run for run in ran if run.passed]
        passed, failed = sum(run.passed for run in tests), sum(run.failed for run in tests)
        said = f"{passed:,} passed" + (f", {failed:,} failed" if failed else "") if tests else ""
        found.append([f"{package} {version}", ", ".join(devices), str(len(ran) - len(tests)) if len(ran) > len(tests)
                      else "", said, max(run.date for run in ran)])  # fmt: skip
    return found


COLUMNS = ["version", "where", "benchmarks", "tests", "last run"]
