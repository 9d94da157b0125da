# SPDX-License-Identifier: Apache-2.0
"""Serve over HTTP on one GPU with vLLM's own attention and with a policy, one server after the other.

    python benchmarks/serving/vllm_serving.py --out FILE                   # vLLM's FLASH_ATTN, then dynaxx
    python benchmarks/serving/vllm_serving.py --only dynaxx --soak 8 --concurrent 200 --out FILE

Servers have random weights of Llama-3.1-8B's shape and vLLM's defaults; the policy reads a window of 1,024 tokens, the
first 128 and 10 % of the rest. On one GPU a fair comparison gives each server the whole GPU, with all of its memory and
processors, so the second one starts after the first one has ended. Both get the same requests at the same times. Each
server goes through these parts, in this order:

- start: seconds from the command until `/health` answers. Caches on disk stay between servers of one backend.
- alone: prompts of each length, one at a time, the longest first: it is the very first request of the server.
- alone by share: long prompts again under policies that read other shares of the blocks, only with `--shares`.
- traffic: mixed prompts at a fixed rate, when every length has been served once.
- decoding: tokens per second of as many contexts of 32,768 tokens as the cache holds, up to 16.
- soak: `vllm_soak.py`, only with `--soak MINUTES`.

Results are written after every part, as JSON by backend. `--tables FILE FILE` starts nothing: it reads such files and
writes the rows and bars of the documentation, for `record.py --from`:

    python benchmarks/serving/vllm_serving.py --tables own.json dynaxx.json --out tables.json

`--again FILE FILE` adds the starts of later servers, whose caches on disk are full.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import option_types
import vllm_soak
from vllm_gpu import PAGE, Result, has_gpu, save_model, save_policy
from vllm_traffic import Server, add_traffic_options, decoding, mixed, one_at_a_time

NAME = "model"
PARTS = ("alone", "traffic", "decoding")
CPU = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024")


@contextmanager
def serving(
    which: str, arguments: argparse.Namespace, folder: Path
) -> Iterator[tuple[Server, subprocess.Popen[bytes], Path]]:
    """Start a server, wait until it is healthy, and end it.

    Raises:
        TimeoutError: it does not start; the message ends with its log.
    """
    cuda = has_gpu()
    model = save_model(folder / "model", arguments.shape, "bfloat16" if cuda else "float32")
    policy = folder / "policy.json"
    if which == "dynaxx" and not policy.exists():
        save_policy(policy, arguments.shape, "sparse")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", NAME, "--load-format", "dummy", "--skip-tokenizer-init"]
    command += ["--max-model-len", str(arguments.max_model_len)]
    if cuda:
        command += ["--attention-backend", "FLASH_ATTN" if which == "own" else "CUSTOM"]
        command += ["--block-size", str(PAGE)] if which == "dynaxx" else []
    else:
        command += CPU
    command += arguments.engine.split()
    environment = {name: value for name, value in os.environ.items() if name != "DYNAXX_POLICY"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if which == "dynaxx":
        environment["DYNAXX_POLICY"] = str(policy)
        environment["DYNAXX_FOLLOW"] = str(int(bool(arguments.shares)))
    log = Path(f"{arguments.out or folder / 'serving'}.{which}.log")
    with log.open("wb") as out:
        running = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(f"http://localhost:{port}", NAME)
    try:
        server.wait(arguments.patience, lambda: running.poll() is None)
        yield server, running, log
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{log.read_text()[-5000:]}") from error
    finally:
        end(running)


def end(running: subprocess.Popen[bytes]) -> None:
    """End a server and its processes, so that the next one finds the GPU's memory free."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(running.pid, how)
        except ProcessLookupError:
            return
        for _ in range(100):
            running.poll()
            try:
                os.killpg(running.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def facts(log: Path) -> dict[str, Any]:
    """Read what a server said of its cache and its kernels."""
    text = log.read_text(errors="replace")
    size = re.search(r"KV cache size: ([\d,]+) tokens", text)
    kernels = re.findall(r"(\w+ kernels of layer \d+: \d+ compiled or loaded in [\d.]+ s)", text)
    late = re.findall(r"JIT compilation during inference[^\n]*", text)
    return {"cache_tokens": int(size[1].replace(",", "")) if size else 0, "kernels": kernels, "compiled_late": late}


def measure(which: str, arguments: argparse.Namespace, result: Result, found: dict[str, Any]) -> None:
    """Start a server and take it through its parts."""
    parts = arguments.parts
    with tempfile.TemporaryDirectory() as made:
        folder, begun = Path(arguments.folder or made), time.monotonic()
        with serving(which, arguments, folder) as (server, running, log):
            found["start_s"] = round(time.monotonic() - begun, 1)
            found |= facts(log)
            result.add(**{which: found})
            wait_for(arguments.wait_for)
            if "alone" in parts:
                found["alone"] = one_at_a_time(server, arguments.lengths, arguments.repeats)
                result.add(**{which: found})
            if arguments.shares and which == "dynaxx":
                found["alone by share"] = by_share(server, arguments, folder / "policy.json", log)
                result.add(**{which: found})
            if "traffic" in parts:
                found["traffic"] = mixed(server, arguments)
                result.add(**{which: found})
            if "decoding" in parts:
                room = found["cache_tokens"] // (arguments.context + 1000)
                found["decoding"] = decoding(server, max(1, min(16, room)), arguments.context, 200)
                result.add(**{which: found})
            if arguments.soak:
                found["soak"] = soak(server, running.pid, arguments, lambda so_far: keep(result, which, found, so_far))
            found["failed"] = server.errors[:5]
            found |= facts(log)
            result.add(**{which: found})


def by_share(server: Server, arguments: argparse.Namespace, policy: Path, log: Path) -> dict[str, Any]:
    """Send prompts one at a time under policies with other shares of the blocks, which the server takes over."""
    found: dict[str, Any] = {}
    for at, share in enumerate((*arguments.shares, 0.1)):
        save_policy(policy, arguments.shape, "sparse", share=share)
        time.sleep(3)  # the server looks every second
        if "rejected" in log.read_text(errors="replace"):
            found["error"] = f"the policy with a share of {share} was rejected; see {log}"
            break
        if share != 0.1:
            long = [each for each in arguments.lengths if each > 10_000]
            found[str(share)] = one_at_a_time(server, long, arguments.repeats, 1 + at)
    return found


def wait_for(path: str) -> None:
    """Wait until a file is there, if one is named: other programs that use the GPU have ended then."""
    until = time.monotonic() + 120
    while path and not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.2)


def tables(own: dict[str, Any], ours: dict[str, Any], again: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows and bars of both servers side by side; `again` has later starts of both, or is empty."""
    bars: list[dict[str, Any]] = []
    return {
        "alone": alone_rows(own, ours, bars),
        "traffic": traffic_rows(own, ours, bars) if "traffic" in own else [],
        "decoding": decoding_rows(own, ours, bars) if "decoding" in own else [],
        "starts": start_rows(own, ours, again),
        "bars": bars,
    }


def alone_rows(own: dict[str, Any], ours: dict[str, Any], bars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of prompts one at a time, and add their bars."""
    alone = []
    pairs = [("very first request", own["alone"]["very_first_s"], ours["alone"]["very_first_s"])]
    for tokens, seconds in own["alone"]["median_s"].items():
        if len(own["alone"]["first_token_s"][tokens]) > 1:
            pairs.append((tokens, seconds, ours["alone"]["median_s"][tokens]))
    longest = next(iter(own["alone"]["median_s"]))
    for name, theirs, mine in pairs:
        tokens = longest if name.startswith("very") else name
        label = f"{int(tokens):,} tokens" + (", the very first request" if name.startswith("very") else "")
        alone.append({"one prompt at a time": label, "FLASH_ATTN": span(theirs), "dynaxx": span(mine),
                      "speed-up": f"{theirs / mine:.2f}x"})  # fmt: skip
        asked = {"32768": 1.5, "131072": 2.8, "1000": 0.98}.get(tokens)
        if asked is not None:
            bars.append(bar(f"first token of {label}", asked, theirs / mine))
    return alone


def traffic_rows(own: dict[str, Any], ours: dict[str, Any], bars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of mixed traffic, and add their bars."""
    traffic = []
    theirs, mine = (each["traffic"]["first_token_ms"] for each in (own, ours))
    for name in theirs:
        if not theirs[name]["requests"]:
            continue
        row = {"tokens of the prompt": name, "requests": theirs[name]["requests"]}
        for key in ("mean", "p50", "p99"):
            row |= {f"FLASH_ATTN {key}": span(theirs[name][key] / 1e3), f"dynaxx {key}": span(mine[name][key] / 1e3)}
        traffic.append(row)
    for key in ("mean", "p99"):
        bars.append(bar(f"mixed traffic: {key} first token", 1.0, theirs["all"][key] / mine["all"][key]))
    below = next(name for name in theirs if name != "all")
    bars.append(bar(f"mixed traffic, {below} tokens: mean", 0.98, theirs[below]["mean"] / mine[below]["mean"]))
    return traffic


def decoding_rows(own: dict[str, Any], ours: dict[str, Any], bars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the row of sequences that decode together, and add its bar."""
    theirs, mine = (each["decoding"]["tokens_per_second"] for each in (own, ours))
    label = f"{ours['decoding']['sequences']} sequences of {ours['decoding']['context']:,} tokens"
    bars.append(bar(f"generated tokens per second, {label}", 1.5, mine / theirs))
    return [{"decoding": label, "FLASH_ATTN": f"{theirs:,.0f} tokens/s", "dynaxx": f"{mine:,.0f} tokens/s",
             "speed-up": f"{mine / theirs:.2f}x"}]  # fmt: skip


def start_rows(own: dict[str, Any], ours: dict[str, Any], again: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the seconds until servers were healthy, and what of them dynaxx's kernels took."""
    rows = []
    for name, pair in (("empty", [own, ours]), ("full", again)):
        if pair:
            theirs, mine = pair
            kernels = sum(float(seconds) for seconds in re.findall(r"in ([\d.]+) s", " ".join(mine["kernels"])))
            rows.append({"caches on disk": name, "FLASH_ATTN": f"{theirs['start_s']:.0f} s",
                         "dynaxx": f"{mine['start_s']:.0f} s", "of which its kernels": f"{kernels:.1f} s"})  # fmt: skip
    return rows


def bar(name: str, asked: float, value: float) -> dict[str, Any]:
    """Return a bar: how many times vLLM's own speed was asked, and measured."""
    return {"name": name, "workload": "times vLLM's own", "bar": f"{asked:g}x", "value": f"{value:.2f}x",
            "ok": value >= asked}  # fmt: skip


def span(seconds: float) -> str:
    """Return seconds in words."""
    return (
        f"{seconds:.2f} s"
        if seconds >= 2
        else f"{seconds * 1e3:,.0f} ms"
        if seconds >= 0.1
        else f"{seconds * 1e3:.1f} ms"
    )


def soak(
    server: Server, pid: int, arguments: argparse.Namespace, progress: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Send many requests at a time for some minutes."""
    minutes = arguments.soak
    if arguments.until:
        minutes = min(minutes, (arguments.until - time.time()) / 60)
    options = SimpleNamespace(
        url=server.url.geturl(), model=NAME, concurrent=arguments.concurrent, minutes=minutes, timeout=300, pid=pid,
        longest=arguments.soak_longest, vocabulary=32_000,
    )  # fmt: skip
    return vllm_soak.soak(options, progress)  # type: ignore[arg-type]


def keep(result: Result, which: str, found: dict[str, Any], so_far: dict[str, Any]) -> None:
    """Write what a soak has found so far, in case that it is cut off."""
    found["soak"] = so_far
    result[which] = found
    if result.path:
        Path(result.path).write_text(json.dumps(result, indent=1))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("own", "dynaxx"), help="one of the two")
    parser.add_argument(
        "--parts",
        type=option_types.several(option_types.one_of(PARTS), empty=True),
        default=",".join(PARTS),
        help="of each server, by name",
    )
    parser.add_argument("--shape", default="8b", choices=("8b", "small"))
    parser.add_argument(
        "--shares",
        type=option_types.several(option_types.share, empty=True),
        default=[],
        help="of the blocks, for prompts sent again under other policies",
    )
    parser.add_argument("--max-model-len", type=int, default=131_328)
    parser.add_argument("--context", type=int, default=32_768, help="tokens of each sequence that decodes")
    parser.add_argument("--soak", type=float, default=0, help="minutes")
    parser.add_argument("--until", type=float, default=0, help="end the soak at this time (seconds since 1970)")
    parser.add_argument("--soak-longest", type=int, default=8000, help="tokens of a prompt in the soak")
    parser.add_argument("--concurrent", type=int, default=200, help="clients of the soak")
    parser.add_argument("--engine", default="", help="further options of the server, in one argument")
    parser.add_argument("--wait-for", default="", help="a file; the parts begin when it is there")
    parser.add_argument("--patience", type=float, default=400, help="seconds for a start")
    parser.add_argument("--folder", default="", help="of model and policy; vLLM keeps compiled code by its path")
    parser.add_argument("--out", default="", help="a JSON file; logs go beside it")
    parser.add_argument("--tables", nargs=2, type=Path, metavar="FILE", help="results to read, of own and of dynaxx")
    parser.add_argument("--again", nargs=2, type=Path, metavar="FILE", help="with --tables: later starts of both")
    add_traffic_options(parser)
    arguments = parser.parse_args()
    if arguments.tables:
        files = [json.loads(path.read_text()) for path in (*arguments.tables, *(arguments.again or ()))]
        own, ours, *again = [found[which] for found, which in zip(files, ("own", "dynaxx") * 2, strict=False)]
        Path(arguments.out).write_text(json.dumps(tables(own, ours, again), indent=1))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives this program
    result, failed = Result(arguments.out), False
    for which in (arguments.only,) if arguments.only else ("own", "dynaxx"):
        found: dict[str, Any] = {}
        try:
            measure(which, arguments, result, found)
        except TimeoutError as error:
            found["error"] = str(error)
            result.add(**{which: found})
        failed |= "error" in found or bool(found.get("failed") or found.get("soak", {}).get("failed"))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
