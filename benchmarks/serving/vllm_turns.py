# SPDX-License-Identifier: Apache-2.0
"""Time the first token of two vLLM engines that share one GPU, in turns: FLASH_ATTN and a policy.

    python benchmarks/serving/vllm_turns.py --seconds 300 --out turns.json

Two GPUs differ by some percent, and one GPU by its temperature, so the fairest comparison asks both engines for one
prompt after the other. Each engine is a process with random weights of Llama-3.1-8B's shape, vLLM's defaults but a
small cache, and the server's chunks of 8,192 tokens; while one computes, the other waits. The policy reads a window of
1,024 tokens, the first 128, and 10 % of the blocks besides. For long prompts there is a third turn ("tenth"), with a
smaller choice, so that window, first tokens and choice are 10 % of the blocks together.

Prompts are random, every one another. Results are written after every prompt. The program ends its rounds when the next
prompt would pass `--seconds` since its start. `--tables FILE` writes the rows for `record.py --from`.

`--kernels LENGTHS` also profiles prompts of these lengths after the first round, in turns as well, and writes the time
of their kernels by group and by name. Every prompt is written with the time at which it began, so that clocks and power
that another program reads from the card can be laid beside it. `--busy PROCESSES` asks prompts of 1,000 tokens at the
end while so many processes compute on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_gpu import PAGE, first_token, prompt, save_model, save_policy
from vllm_profile import GROUPS, WHOLE, kernels_of, parts_of, summary
from vllm_serving import bar, span, wait_for

TURNS = ("own", "dynaxx", "tenth")
LONG = 20_000  # tokens from which a tenth of the blocks is more than the window and the first tokens
SHORT, AGAIN = 4000, 6  # prompts of fewer tokens are sent so often in every round, since their times vary
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # engines that start together do not share
TARGETS = {32768: 1.5, 131072: 2.8, 1000: 0.98}
SECONDS = 1.5e-4  # per token, of all three turns together, at most: to end in time


def work(which: str, arguments: argparse.Namespace) -> None:
    """Start an engine, then answer lines of (tokens, turn, profiled) on standard input: the time to a first token."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output goes to the log

    def say(answer: Any) -> None:
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()

    begun, folder, cuda = time.monotonic(), Path(tempfile.mkdtemp()), torch.cuda.is_available()
    model = save_model(folder / "model", arguments.shape, "bfloat16" if cuda else "float32")
    os.environ.pop("DYNAXX_POLICY", None)
    options: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}} if cuda else {}
    if which == "dynaxx":
        os.environ["DYNAXX_POLICY"] = str(save_policy(folder / "policy.json", arguments.shape, "sparse"))
    if cuda:
        options |= {"kv_cache_memory_bytes": arguments.cache, "gpu_memory_utilization": 0.4}
        options |= {"attention_backend": "FLASH_ATTN" if which == "own" else "CUSTOM"}
        options |= {"block_size": PAGE} if which == "dynaxx" else {}
    from vllm import LLM

    llm = LLM(
        str(model), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, seed=1,
        disable_log_stats=True, max_model_len=arguments.max_model_len, max_num_batched_tokens=arguments.chunk,
        max_num_seqs=16, enforce_eager=not cuda, **options,
    )  # fmt: skip
    say(time.monotonic() - begun)
    from dynaxx import load_policy
    from dynaxx.integrations.vllm.engine import current

    draw, share = random.Random(0), 0.1
    for line in sys.stdin:
        tokens, turn, profiled = json.loads(line)
        wanted, engine = share_of_a_tenth(tokens) if turn == "tenth" else 0.1, current()
        if engine is not None and wanted != share:
            share = wanted
            engine.replace(load_policy(save_policy(folder / "policy.json", arguments.shape, "sparse", share=share)))
        request = prompt(draw, tokens)
        say(profile(llm, request, folder / "trace.json") if profiled else first_token(llm, request))


def share_of_a_tenth(tokens: int) -> float:
    """Return the share to choose so that 10 % of the blocks are read with the window and the first tokens."""
    visible = [row + 1 for row in range(-(-tokens // 128))]
    always = sum(min(each, 10) for each in visible)  # nine blocks of the window, and the first
    return round(0.1 - (always + len(visible) / 2) / sum(visible), 4)  # a choice is rounded up, by half a block


def profile(llm: Any, request: dict[str, list[int]], path: Path) -> dict[str, Any]:
    """Return the seconds to the first token of one prompt, and a summary of its kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        seconds = first_token(llm, request)
    recorded.export_chrome_trace(str(path))
    return {"first_token_s": seconds, **summary(kernels_of(path), 60)}


class Engines:
    """The processes of both engines."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.running: dict[str, subprocess.Popen[str]] = {}
        for which in ("own", "dynaxx"):
            command = [sys.executable, __file__, "--worker", which, "--shape", arguments.shape]
            command += ["--max-model-len", str(arguments.max_model_len), "--chunk", str(arguments.chunk)]
            command += ["--cache", str(arguments.cache)]
            apart = {name: f"{os.environ[name]}-{which}" for name in CACHES if name in os.environ}
            with Path(f"{arguments.out}.{which}.log").open("wb") as log:
                self.running[which] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    env={**os.environ, **apart},
                )  # fmt: skip

    def started(self) -> dict[str, float]:
        """Wait for both; return the seconds that each took."""
        return {which: self._answer(which) for which in self.running}

    def ask(self, turn: str, tokens: int, *, profiled: bool = False) -> Any:
        """Return the seconds to the first token of a prompt, or its profile."""
        which = "own" if turn == "own" else "dynaxx"
        stdin = self.running[which].stdin
        assert stdin is not None, "opened as a pipe"
        stdin.write(json.dumps([tokens, turn, profiled]) + "\n")
        stdin.flush()
        return self._answer(which)

    def end(self) -> None:
        """End both."""
        for engine in self.running.values():
            if engine.stdin is not None:
                engine.stdin.close()
        for engine in self.running.values():
            try:
                engine.wait(8)
            except subprocess.TimeoutExpired:
                engine.kill()

    def _answer(self, which: str) -> Any:
        stdout = self.running[which].stdout
        assert stdout is not None, "opened as a pipe"
        line = stdout.readline()
        if not line:
            raise SystemExit(f"the engine {which} has ended; see its log beside the results")
        return json.loads(line)


def measure(arguments: argparse.Namespace) -> None:
    """Ask both engines in turns until the time is over."""
    until, lengths = time.monotonic() + arguments.seconds, [int(each) for each in arguments.lengths.split(",")]
    engines = Engines(arguments)
    found: dict[str, Any] = {
        "starts": engines.started(),
        "warm-up": [],
        "runs": [],
        "began": [],
        "kernels": [],
        "busy": [],
    }
    print(found["starts"], f"{until - time.monotonic():.0f} s left", flush=True)
    wait_for(arguments.wait_for)
    to_profile = [int(each) for each in arguments.kernels.split(",") if each]

    def ask(kind: str, turn: str, tokens: int) -> None:
        if kind == "runs":
            found["began"].append(time.time())
        found[kind].append([turn, tokens, engines.ask(turn, tokens, profiled=kind == "kernels")])
        print(*(found[kind][-1] if kind != "kernels" else (turn, tokens, "profiled")), flush=True)
        Path(arguments.out).write_text(json.dumps(found))

    turns_of = lambda tokens: TURNS if tokens >= LONG else TURNS[:2]
    for tokens in lengths:
        for turn in turns_of(tokens):
            if turn != "own" or tokens < 50_000:  # its kernels are the same at any length
                ask("warm-up", turn, tokens)
    rounds = sorted(lengths) + lengths
    for at in range(10_000):
        if at == len(lengths):
            for tokens in to_profile:
                for turn in TURNS[:2]:
                    ask("kernels", turn, tokens)
        tokens = rounds[at % len(rounds)]
        if time.monotonic() + SECONDS * tokens + 3 * bool(arguments.busy) > until:
            break
        turns = turns_of(tokens)
        for again in range(AGAIN if tokens < SHORT else 1):
            for turn in range(len(turns)):
                ask("runs", turns[(at + again + turn) % len(turns)], tokens)
    if arguments.busy:
        loop = [sys.executable, "-c", "while True: sum(range(1000))"]
        others = [subprocess.Popen(loop) for _ in range(arguments.busy)]
        for turn in TURNS[:2] * 8:
            ask("busy", turn, 1000)
        for other in others:
            other.kill()
    engines.end()


def tables(found: dict[str, Any]) -> dict[str, Any]:
    """Return rows and bars of medians."""
    rows, bars = [], []
    for tokens in sorted({tokens for _, tokens, _ in found["runs"]}, reverse=True):
        times = {turn: [s for other, n, s in found["runs"] if (other, n) == (turn, tokens)] for turn in TURNS}
        own, ours, tenth = (statistics.median(times[turn] or [0.0]) for turn in TURNS)
        rows.append({
            "tokens": f"{tokens:,}", "prompts each": len(times["own"]), "FLASH_ATTN": spread(times["own"]),
            "dynaxx": spread(times["dynaxx"]),
            "speed-up": f"{own / ours:.2f}x", "10 % of the blocks in all": span(tenth) if tenth else "",
            "its speed-up": f"{own / tenth:.2f}x" if tenth else "",
        })  # fmt: skip
        if tokens in TARGETS:
            bars.append(bar(f"first token of {tokens:,} tokens", TARGETS[tokens], own / ours))
            if tenth:
                bars.append(
                    bar(f"first token of {tokens:,} tokens, 10 % of the blocks in all", TARGETS[tokens], own / tenth)
                )
    return {"rows": rows, "bars": bars, "kernels": kernel_rows(found["kernels"]), "busy": busy_rows(found)}


def spread(seconds: list[float]) -> str:
    """Return a median in words; of ten and more times with their quartiles."""
    middle = statistics.median(seconds or [0.0])
    if len(seconds) < 10:
        return span(middle)
    low, _, high = statistics.quantiles(seconds)
    return f"{span(middle)} ({low * 1e3:.1f} to {high * 1e3:.1f})"


def busy_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the medians of prompts of 1,000 tokens with an idle and with a busy host."""
    rows = []
    for host, runs in (("idle", found["runs"]), ("busy", found["busy"])):
        times = {turn: [s for other, n, s in runs if (other, n) == (turn, 1000)] for turn in TURNS[:2]}
        if times["own"]:
            own, ours = (statistics.median(times[turn]) for turn in TURNS[:2])
            rows.append(
                {"host": host, "prompts each": len(times["own"]), "FLASH_ATTN": span(own), "dynaxx": span(ours)}
            )
    return rows


def kernel_rows(profiles: list[Any]) -> list[dict[str, Any]]:
    """Return the ms of kernels by group, with columns by length and engine."""
    columns = {
        f"{tokens:,} tokens, {'FLASH_ATTN' if turn == 'own' else turn}": parts_of(each)
        for turn, tokens, each in profiles
    }
    names = [*GROUPS, *WHOLE]
    return [{"ms": name, **{title: f"{each[name]:,.1f}" for title, each in columns.items()}} for name in names]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of the program, with the start of the engines")
    parser.add_argument("--lengths", default="131072,32768,8192,1000", help="prompts, in tokens")
    parser.add_argument("--kernels", default="", help="lengths of prompts to profile after the first round, on a GPU")
    parser.add_argument("--wait-for", default="", help="a file; prompts begin when it is there")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute on the host at the end")
    parser.add_argument("--shape", default="8b", choices=("8b", "small"))
    parser.add_argument("--max-model-len", type=int, default=131_328)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--cache", type=int, default=18_000_000_000, help="bytes of the cache of each engine")
    parser.add_argument("--out", default="turns.json", help="a JSON file; logs go beside it")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="results to read; starts nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tables:
        Path(arguments.out).write_text(json.dumps(tables(json.loads(arguments.tables.read_text())), indent=1))
    elif arguments.worker:
        work(arguments.worker, arguments)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
