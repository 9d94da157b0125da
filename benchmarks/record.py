# SPDX-License-Identifier: Apache-2.0
r"""Run a benchmark that prints JSON, and keep its rows with commit, machine, versions and date.

    python benchmarks/record.py decode_suite --rows decode --title "Decoding on a CPU" -- \
        python -m benchmarks.suites cpu --only decode --threads 1 --json

writes benchmarks/results/decode_suite.json; `python benchmarks/render.py` puts it into the pages that name it.
`--rows` names the list of rows in the benchmark's JSON, and `--columns` the fields to keep; `field=title` also
renames a field. A result from another machine comes from its file, with options that say what it was measured on:

    python benchmarks/record.py distributed --from distributed.json --commit abc1234 --device "2 NVIDIA H100" \
        --version torch=2.11.0 --title "..." -- python benchmarks/distributed/distributed.py
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.targets import targets_of

from dynaxx.lab.machine import machine_facts

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "benchmarks" / "runs"  # of tests, written by `pytest --record FILE`
KEPT_VERSIONS = ("torch", "triton", "transformers", "vllm")


def commit() -> str:
    """Return the short hash of HEAD, with `+changes` if tracked files differ from it; "" outside a repository."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return ""
    status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def place() -> tuple[str, dict[str, str]]:
    """Return the device, and the versions that a result depends on, with those of Python and of the CUDA driver."""
    here = machine_facts()
    versions = {"python": here.python} | {name: here.versions[name] for name in KEPT_VERSIONS if name in here.versions}
    if here.gpus:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        versions["CUDA driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return ", ".join(here.gpus) or f"{here.cpu}, {here.cores} cores", versions


def run_of(arguments: Sequence[str], counts: Mapping[str, int]) -> str:
    """Return the record of a run of tests as JSON."""
    device, versions = place()
    before = ("", *arguments)
    shown = [each for each, last in zip(arguments, before, strict=False) if "--record" not in (each[:8], last)]
    run = {"command": shlex.join(["pytest", *shown]), "commit": commit(), "date": today(), "device": device,
           "versions": versions, **counts}  # fmt: skip
    return json.dumps(run, indent=1) + "\n"


def today() -> str:
    """Return the date."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def text_of(value: Any) -> str:
    """Return a cell's text: numbers with four significant digits and thousands separated."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def result_of(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return a result file's content from a benchmark's JSON."""
    rows = found[args.rows]
    if not rows:
        raise SystemExit(f"error: `{args.rows}` of the benchmark's JSON is empty")
    columns = dict(each.split("=", 1) if "=" in each else (each, each) for each in args.columns or rows[0])
    bars = [
        {
            "bar": f"{each['name']}, {each['workload']}",
            "asked": text_of(each.get("target", each.get("bar"))),
            "measured": text_of(each["value"]),
            "met": bool(each["ok"]),
        }
        for each in found.get("targets", found.get("bars")) or [target.as_dict() for target in targets_of(found)]
        if each["ok"] is not None
    ]
    device, versions = place()
    if args.source:
        versions = dict(each.split("=", 1) for each in args.version)
    return {
        "title": args.title,
        "command": shlex.join(args.command),
        "commit": args.commit or commit(),
        "date": today(),
        "recorded": "measured",
        "device": args.device or device,
        "versions": versions,
        "setting": args.setting,
        "columns": list(columns.values()),
        "rows": [[text_of(row.get(column)) for column in columns] for row in rows],
        "bars": bars,
    }


def main() -> None:
    """Run the command and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="the result file's name, without .json")
    parser.add_argument("--rows", default="rows", help="the list of rows in the benchmark's JSON")
    parser.add_argument("--columns", type=lambda text: text.split(","), help="fields to keep; all by default")
    parser.add_argument("--title", required=True)
    parser.add_argument("--setting", default="", help="shapes, dtypes, and what is counted")
    parser.add_argument("--from", dest="source", type=Path, help="a JSON file of the benchmark, instead of running it")
    parser.add_argument("--commit", default="", help="with --from: the commit that was measured")
    parser.add_argument("--device", default="", help="with --from: the GPU or CPU")
    parser.add_argument("--version", action="append", default=[], help="with --from: package=version, repeatable")
    parser.add_argument("command", nargs="+", help="the benchmark, after --")
    args = parser.parse_args()
    if args.source and not (args.commit and args.device and args.version):
        parser.error("--from needs --commit, --device and --version: the file does not say what it was measured on")
    if args.source:
        text = args.source.read_text(encoding="utf-8")
    else:
        run = subprocess.run(args.command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if run.returncode not in (0, 1):  # 1: a bar was missed, which the file says
            sys.exit(run.returncode)
        text = run.stdout
    path = ROOT / "benchmarks" / "results" / f"{args.name}.json"
    path.write_text(json.dumps(result_of(json.loads(text), args), indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
