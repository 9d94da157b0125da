# SPDX-License-Identifier: Apache-2.0
"""Profile the first token of a long prompt in a vLLM server: which kernels take its time, and how long the GPU waits.

    python benchmarks/serving/vllm_profile.py --only dynaxx --lengths 32768,131072 --out FILE

Starts the servers of `vllm_serving.py` with torch's profiler (vLLM's `/start_profile`), which records the kernels of
one prompt of each length. Before that, it sends prompts of these lengths without the profiler, so that the file says
how much the profiler slows them. For each length it writes how long the GPU ran kernels, how long it waited for the
host, and the kernels by their share of the time.

    python benchmarks/serving/vllm_profile.py --trace TRACE.json.gz ...          # only sums up such traces
    python benchmarks/serving/vllm_profile.py --tables own.json dynaxx.json --out tables.json     # rows for record.py
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import option_types
from vllm_gpu import Result
from vllm_serving import facts, serving
from vllm_traffic import Server, one_at_a_time

GROUPS = {  # kernels by name; the first pattern that fits
    "attention": "_sparse_attention|flash::",
    "scores and choice of blocks": "_query_scores|_pool_kernel|_choose_rows|_emit_entries|_running_sum",
    "copies of keys, values and results": "gather_kernel<16|Memcpy DtoD|direct_copy|index_select",
    "summaries of pages for decoding": "_summarize_pages",
    "keys and values into the cache": "reshape_and_cache|_write_pages",
    "linear layers": "nvjet|gemm|cutlass",
    "activations, norms, rotary embedding": "triton_",
    "everything else": "",
}
WHOLE = ("the GPU waits", "from the first to the last kernel")


def kernels_of(path: Path) -> list[tuple[str, float, float]]:
    """Return name, start and duration, in microseconds, of a trace's kernels and copies, by their starts."""
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    found = [(each["name"], float(each["ts"]), float(each["dur"])) for each in events if each.get("cat") in kinds]
    return sorted(found, key=lambda each: each[1])


def summary(kernels: list[tuple[str, float, float]], most: int) -> dict[str, Any]:
    """Return the times of a trace in ms: from the first to the last kernel, busy, waiting, and by kernel."""
    if not kernels:
        return {"kernels": 0}
    totals: dict[str, list[float]] = defaultdict(list)
    busy, end, gaps, waits = 0.0, kernels[0][1], list[float](), list[tuple[float, float, str]]()
    for name, start, length in kernels:
        totals[name].append(length)
        if start > end:
            gaps.append(start - end)
            waits.append((start - end, start - kernels[0][1], name))
        busy += max(0.0, start + length - max(end, start))
        end = max(end, start + length)
    span = end - kernels[0][1]
    by_time = sorted(totals.items(), key=lambda each: -sum(each[1]))
    return {
        "span_ms": span / 1e3, "busy_ms": busy / 1e3, "waiting_ms": sum(gaps) / 1e3, "kernels": len(kernels),
        "gaps_over_20_us": len([each for each in gaps if each > 20]),
        "ms_of_gaps_over_20_us": sum(each for each in gaps if each > 20) / 1e3,
        "longest_gaps": [{"us": round(us, 1), "at_ms": round(at / 1e3, 2), "before": name[:80]}
                         for us, at, name in sorted(sorted(waits, reverse=True)[:30], key=lambda each: each[1])],
        "by_kernel": [{"name": name[:160], "calls": len(each), "ms": round(sum(each) / 1e3, 3),
                       "mean_us": round(sum(each) / len(each), 1)} for name, each in by_time[:most]],
    }  # fmt: skip


def parts_of(profiled: dict[str, Any]) -> dict[str, float]:
    """Return the ms of a profile by group of kernels, and those in which the GPU waited."""
    found = dict.fromkeys(GROUPS, 0.0)
    for kernel in profiled["by_kernel"]:
        found[next(name for name, pattern in GROUPS.items() if re.search(pattern, kernel["name"]))] += kernel["ms"]
    found["everything else"] += profiled["busy_ms"] - sum(found.values())
    return found | dict(zip(WHOLE, (profiled["waiting_ms"], profiled["span_ms"]), strict=True))


def tables(own: dict[str, Any], ours: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows by group of kernels, with columns by length and server."""
    lengths = [name.removeprefix("profile of ") for name in ours if name.startswith("profile of ")]
    columns = {
        f"{int(length):,} tokens, {title}": parts_of(each[f"profile of {length}"])
        for length in lengths
        for title, each in (("FLASH_ATTN", own), ("dynaxx", ours))
    }
    names = [*GROUPS, *WHOLE]
    return [{"ms": name, **{title: f"{each[name]:,.1f}" for title, each in columns.items()}} for name in names]


def post(server: Server, path: str) -> None:
    """Call one of vLLM's profiler endpoints."""
    request = urllib.request.Request(f"{server.url.geturl()}{path}", b"", method="POST")
    with urllib.request.urlopen(request, timeout=200) as answer:
        answer.read()


def newest(folder: Path, known: set[Path], seconds: float = 100) -> Path | None:
    """Wait for a trace that is not among the known ones and no longer grows; None if none comes."""
    until, size = time.monotonic() + seconds, -1
    while time.monotonic() < until:
        new = [path for path in folder.rglob("*.json*") if path not in known]
        if new:
            now = new[0].stat().st_size
            if now == size and now > 0:
                return new[0]
            size = now
        time.sleep(1)
    return None


def profile(which: str, arguments: argparse.Namespace, result: Result) -> None:
    """Start a server and profile a prompt of each length."""
    lengths = arguments.lengths
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        traces = Path(name) / "traces"
        traces.mkdir()
        options = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False,
                   "torch_profiler_dump_cuda_time_total": False, "ignore_frontend": True}  # fmt: skip
        arguments.engine = f"{arguments.more} --profiler-config {json.dumps(options, separators=(',', ':'))}"
        begun = time.monotonic()
        with serving(which, arguments, Path(name)) as (server, _, log):
            found["start_s"] = round(time.monotonic() - begun, 1)
            found |= facts(log)
            result.add(**{which: found})
            found["alone"] = one_at_a_time(server, lengths, arguments.repeats)
            result.add(**{which: found})
            for tokens in lengths:
                known = set(traces.rglob("*.json*"))
                post(server, "/start_profile")
                answer = server.send(server.body(tokens, 1, 3 * tokens), tokens)
                post(server, "/stop_profile")
                trace = newest(traces, known)
                if answer is None or trace is None:
                    found[f"profile of {tokens}"] = {"error": f"no trace; {server.errors[:3]}"}
                else:
                    kernels = kernels_of(trace)
                    if arguments.keep:
                        path = f"{arguments.out}.{which}.{tokens}.json"
                        Path(path).write_text(json.dumps(kernels[: arguments.keep]))
                    sums = summary(kernels, arguments.most)
                    found[f"profile of {tokens}"] = {"first_token_s": answer.times[0], **sums}
                result.add(**{which: found})


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("own", "dynaxx"), help="one of the two servers")
    parser.add_argument("--shape", default="8b", choices=("8b", "small"))
    parser.add_argument("--max-model-len", type=int, default=131_328)
    parser.add_argument(
        "--lengths", type=option_types.several(option_types.count), default="32768,131072", help="prompts, in tokens"
    )
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length without the profiler")
    parser.add_argument("--most", type=int, default=60, help="kernels to list")
    parser.add_argument("--keep", type=int, default=0, help="write so many kernels of each trace, in their order")
    parser.add_argument("--more", default="", help="further options of the server, in one argument")
    parser.add_argument("--patience", type=float, default=400, help="seconds for a start")
    parser.add_argument("--out", default="", help="a JSON file; logs go beside it")
    parser.add_argument("--tables", nargs=2, type=Path, metavar="FILE", help="results to read, of own and of dynaxx")
    parser.add_argument("--trace", nargs="+", type=Path, metavar="FILE", help="traces to sum up; starts nothing")
    arguments = parser.parse_args()
    if arguments.trace:
        for path in arguments.trace:
            print(json.dumps({str(path): summary(kernels_of(path), arguments.most)}, indent=1))
        return
    if arguments.tables:
        own, ours = (json.loads(path.read_text()) for path in arguments.tables)
        Path(arguments.out).write_text(json.dumps({"rows": tables(own["own"], ours["dynaxx"])}, indent=1))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives this program
    result = Result(arguments.out)
    for which in (arguments.only,) if arguments.only else ("own", "dynaxx"):
        profile(which, arguments, result)


if __name__ == "__main__":
    main()
