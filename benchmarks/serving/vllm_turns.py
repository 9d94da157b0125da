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

A fourth turn, "tuned", has the shape of what `dynaxx tune` writes: a window of 256 tokens, the first 128, and shares
that differ between the heads as in `benchmarks/policies/smollm2_cpu.json`; all together 10 % of the blocks.

`--apart` gives each engine the whole card, one after the other: for models that do not fit twice. `--decode 16x32768`
asks for decoding instead: that many sequences together, by FLASH_ATTN and by decode rules with pages of each size in
`--pages` ("64/16": pages of 64, chosen by parts of 16) and each share in `--read`, an engine for each; a rule reads the
first page, the last 128 tokens and the best pages, the share of the pages in all. Engines import vLLM together and
start one after the other; what `--out` has already is not measured again. `--start graphs` leaves out torch.compile and
captures decoding alone; `--start eager` captures nothing. Engines apart are ended when `--seconds` are over, wherever
they are. The exit code is 1 if an engine ended before its answer.

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
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import option_types
from vllm_gpu import PAGE, SHAPES, decoding, first_token, prompt, save_model, save_policy, sizes_of
from vllm_profile import GROUPS, WHOLE, kernels_of, parts_of, summary
from vllm_serving import bar, has_gpu, span, wait_for

TURNS = ("own", "dynaxx", "tenth", "tuned")
HEADS = (0.15, 0.15, 0.3, 0.3, 0.3, 0.2, 0.1, 0.15, 0.06)  # shares that tune gave to the heads of a layer
DECODED = 128  # tokens whose pages a decode rule always reads at the end
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
LONG = 30_000  # tokens from which a tenth of the blocks is more than the window and the first tokens
SHORT, AGAIN = 4000, 6  # prompts of fewer tokens are sent so often in every round, since their times vary
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # engines that start together do not share
TARGETS = {32768: 1.5, 131072: 3, 262144: 5, 1000: 0.98}
TITLES = ("dynaxx", "10 % of the blocks in all", "10 % in all, as tune writes rules")
GAINS = ("speed-up", "its speed-up", "speed-up as tune writes rules")
WARM = 32_768  # tokens of the first prompt of an engine that has the card alone
PASSED = ("shape", "max_model_len", "chunk", "cache", "layers", "start", "quantization", "prefix_caching", "apart",
          "sequences", "context", "steps")  # fmt: skip
SECONDS = 2.2e-4  # per token, of all three turns together, at most: to end in time


def work(which: str, arguments: argparse.Namespace) -> None:
    """Start an engine, then answer lines of (tokens, turn, profiled) on standard input: the time to a first token."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output goes to the log

    def say(answer: Any) -> None:
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()

    begun, folder, cuda = time.monotonic(), Path(tempfile.mkdtemp()), has_gpu()
    model = save_model(folder / "model", arguments.shape, "bfloat16" if cuda else "float32", layers=arguments.layers)
    os.environ.pop("DYNAXX_POLICY", None)
    page, sequences = page_sizes(arguments.page or str(PAGE))[0], max(16, arguments.sequences)
    options: dict[str, Any] = {"quantization": arguments.quantization} if arguments.quantization else {}
    options |= {"kv_cache_memory_bytes": arguments.cache * (1 if cuda else 2), "gpu_memory_utilization": 0.4}
    decode = decode_rule(arguments) if arguments.page else None
    if which == "dynaxx":
        policy = save_policy(folder / "policy.json", arguments.shape, "sparse", layers=arguments.layers, decode=decode)
        os.environ["DYNAXX_POLICY"] = str(policy)
        options |= {"block_size": page} if cuda or arguments.page else {}
    if cuda:
        sizes = [1, 2, 4, 8, 16] if sequences == 16 else [1, sequences]
        options |= {"attention_backend": "FLASH_ATTN" if which == "own" else "CUSTOM"}
        options |= {
            "compilation_config": {"cudagraph_capture_sizes": sizes, **(GRAPHS if arguments.start == "graphs" else {})}
        }
    from vllm import LLM

    imported = time.monotonic() - begun
    if arguments.apart and not sys.stdin.readline():  # until the engine before has ended
        return
    begun = time.monotonic() if arguments.apart else begun
    llm = LLM(
        str(model), load_format="dummy", skip_tokenizer_init=True, seed=1, disable_log_stats=True,
        enable_prefix_caching=arguments.prefix_caching, max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.chunk,
        max_num_seqs=sequences, enforce_eager=not cuda or arguments.start == "eager", **options,
    )  # fmt: skip
    say([imported, time.monotonic() - begun] if arguments.apart else time.monotonic() - begun)
    from dynaxx import load_policy
    from dynaxx.integrations.vllm.engine import current

    draw, active = random.Random(0), rule_of("dynaxx", 0, 0)
    for line in sys.stdin:
        tokens, turn, profiled = json.loads(line)
        wanted, engine = rule_of(turn, tokens, SHAPES[arguments.shape]["num_attention_heads"]), current()
        if turn == "decode":
            say(decoding(llm, draw, arguments.sequences, tokens, arguments.steps, arguments.chunk))
            continue
        if engine is not None and wanted != active:
            active = wanted
            policy = save_policy(
                folder / "policy.json", arguments.shape, "sparse", layers=arguments.layers, decode=decode, **wanted
            )
            engine.replace(load_policy(policy))
        request = prompt(draw, tokens)
        say(profile(llm, request, folder / "trace.json") if profiled else first_token(llm, request))


def rule_of(turn: str, tokens: int, heads: int) -> dict[str, Any]:
    """Return the window and the shares of a turn's rule for a prompt."""
    if turn == "tuned":
        shares = [HEADS[head % len(HEADS)] for head in range(heads)]
        scale = share_of_a_tenth(tokens, 256) / statistics.mean(shares)
        return {"window": 256, "share": tuple(round(scale * each, 4) for each in shares)}
    return {"window": 1024, "share": share_of_a_tenth(tokens) if turn == "tenth" else 0.1}


def decode_rule(arguments: argparse.Namespace) -> tuple[int, Any]:
    """Return the size of the pages and the decode rule that reads a share of the pages, as tune writes rules."""
    import dynaxx as dx
    from dynaxx.selection import MinMax

    page = page_sizes(arguments.page)[1]
    share = round(arguments.share - (page + DECODED) / arguments.context, 4)
    return page, dx.Sink(page) | dx.SlidingWindow(DECODED) | dx.TopK(share, MinMax(bound=0.5))


def page_sizes(page: str) -> tuple[int, int]:
    """Return the tokens of the engine's pages and of the parts that a rule chooses: "64" or "64/16"."""
    engine, _, part = page.partition("/")
    return int(engine), int(part or engine)


def share_of_a_tenth(tokens: int, window: int = 1024) -> float:
    """Return the share to choose so that 10 % of the blocks are read with the window and the first tokens."""
    visible = [row + 1 for row in range(-(-tokens // 128))]
    always = sum(min(each, window // 128 + 2) for each in visible)  # one block more than the window, and the first
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
    """The processes of the engines: "own", "dynaxx", or "dynaxx PAGE SHARE" for a decode rule."""

    def __init__(self, arguments: argparse.Namespace, engines: tuple[str, ...] = TURNS[:2]) -> None:
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.logs: dict[str, Path] = {}
        for which in engines:
            worker, page, share = [*which.split(), "", "0"][:3]
            command = [sys.executable, __file__, "--worker", worker, "--page", page, "--share", share]
            for name in PASSED:
                value = getattr(arguments, name)
                flag = f"--{name.replace('_', '-')}"
                command += [flag] if value is True else [f"{flag}={value}"] if value not in (False, "") else []
            apart = {
                name: f"{os.environ[name]}-{which}" for name in CACHES if name in os.environ and not arguments.apart
            }
            self.logs[which] = Path(f"{arguments.out}.{re.sub('[ /]', '_', which)}.log")
            with self.logs[which].open("wb") as log:
                self.running[which] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    env={**os.environ, **apart},
                )  # fmt: skip

    def started(self) -> dict[str, float]:
        """Wait for both; return the seconds that each took."""
        return {which: self._answer(which) for which in self.running}

    def ask(self, turn: str, tokens: int, *, profiled: bool = False) -> Any:
        """Return the seconds to the first token of a prompt, or its profile."""
        return self.say("own" if turn == "own" else "dynaxx", [tokens, turn, profiled])

    def say(self, which: str, question: Any) -> Any:
        """Return an engine's answer to a line."""
        stdin = self.running[which].stdin
        assert stdin is not None, "opened as a pipe"
        with suppress(BrokenPipeError):  # it has ended, as the answer says
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
        return self._answer(which)

    def end(self, *some: str) -> None:
        """End some, or all."""
        ending = [self.running.pop(which) for which in some or tuple(self.running)]
        for engine in ending:
            if engine.stdin is not None:
                engine.stdin.close()
        for engine in ending:
            try:
                engine.wait(2)
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()

    def kill(self) -> None:
        """End all at once, whatever they do: a question that waits for one ends the program."""
        for engine in tuple(self.running.values()):
            engine.kill()

    def _answer(self, which: str) -> Any:
        stdout = self.running[which].stdout
        assert stdout is not None, "opened as a pipe"
        line = stdout.readline()
        if not line:
            raise SystemExit(f"{self.logs[which].read_text(errors='replace')[-2000:]}\nthe engine {which} has ended")
        return json.loads(line)


def fit(arguments: argparse.Namespace) -> None:
    """Set the longest sequence and the cache to what the prompts need, where they are not given."""
    longest = max(arguments.lengths)
    if arguments.sequences:  # early ones decode while late ones are prompts
        chunks = arguments.sequences * (arguments.context // arguments.chunk + 2)
        longest = arguments.context + chunks + arguments.steps
    arguments.max_model_len = arguments.max_model_len or -(-longest // 128) * 128 + 256
    sizes = sizes_of(arguments.shape, arguments.layers)
    token = 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
    arguments.cache = arguments.cache or max(1, arguments.sequences) * (arguments.max_model_len + 256) * token


def measure(arguments: argparse.Namespace) -> None:
    """Ask both engines in turns until the time is over."""
    until, lengths = time.monotonic() + arguments.seconds, arguments.lengths
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

    def ask(kind: str, turn: str, tokens: int) -> None:
        if kind == "runs":
            found["began"].append(time.time())
        found[kind].append([turn, tokens, engines.ask(turn, tokens, profiled=kind == "kernels")])
        print(*(found[kind][-1] if kind != "kernels" else (turn, tokens, "profiled")), flush=True)
        Path(arguments.out).write_text(json.dumps(found))

    turns_of = lambda tokens: tuple(turn for turn in arguments.turns if tokens >= LONG or turn in TURNS[:2])
    for tokens in lengths:
        for turn in turns_of(tokens):
            if turn != "own" or tokens < 50_000:  # its kernels are the same at any length
                ask("warm-up", turn, tokens)
    rounds = sorted(lengths) + lengths
    for at in range(10_000):
        if at == len(lengths):
            for tokens in arguments.kernels:
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


def measure_apart(arguments: argparse.Namespace) -> None:
    """Ask one engine after the other, each on the whole card."""
    until = time.monotonic() + arguments.seconds
    lengths = arguments.lengths
    found: dict[str, Any] = {
        "starts": {},
        "imports": {},
        "runs": [],
        "began": [],
        "kernels": [],
        "busy": [],
        "decode": {},
    }
    wanted: tuple[str, ...] = TURNS[:2]
    if arguments.sequences:
        rules = [f"dynaxx {page} {share}" for page in arguments.pages for share in arguments.read]
        found |= json.loads(Path(arguments.out).read_text()) if Path(arguments.out).exists() else {}
        wanted = tuple(which for which in ("own", *rules) if which not in found["decode"])
    engines = Engines(arguments, wanted)
    late = threading.Timer(arguments.seconds, engines.kill)
    late.daemon = True
    late.start()

    def note() -> None:
        Path(arguments.out).write_text(json.dumps(found))

    def take(which: str) -> None:
        found["imports"][which], found["starts"][which] = engines.say(which, "start")
        print(
            which,
            "started in",
            f"{found['starts'][which]:.1f} s;",
            f"{until - time.monotonic():.0f} s left",
            flush=True,
        )
        if arguments.sequences:
            found["decode"][which] = engines.say(which, [arguments.context, "decode", False])
            print(which, found["decode"][which], flush=True)
            if which != "own" and "own" in found["decode"]:
                print(decode_row(found, which, arguments), flush=True)
            note()
            return
        turns = [turn for turn in arguments.turns if (turn == "own") == (which == "own")]
        for tokens, turn in [(tokens, turn) for tokens in (0, *lengths) for turn in turns]:
            if (tokens or min(WARM, *lengths)) < LONG and turn not in TURNS[:2]:
                continue
            if not tokens:
                engines.say(which, [min(WARM, *lengths), turn, False])
                continue
            if time.monotonic() + SECONDS * tokens > until:
                continue
            found["began"].append(time.time())
            found["runs"].append([turn, tokens, engines.say(which, [tokens, turn, False])])
            print(*found["runs"][-1], flush=True)
            note()

    failed = False
    for which in wanted:
        if time.monotonic() > until - 30:
            break
        try:
            take(which)
        except SystemExit as ended:  # the others may still work
            print(ended, flush=True)
            failed = True
        engines.end(which)
    engines.end()
    if failed:
        raise SystemExit(1)


def decode_rows(
    found: dict[str, Any], arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows and bars of sequences that decode together."""
    rows, bars = [], []
    for which in found["decode"]:
        if which != "own":
            rows.append(row := decode_row(found, which, arguments))
            what = f"{row['decoding']}, pages of {row['pages of']}, {row['read']} read"
            bars.append(bar(f"generated tokens per second, {what}", 3, float(row["speed-up"].rstrip("x"))))
    return rows, bars


def decode_row(found: dict[str, Any], which: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Return the row of one decode rule."""
    own, ours = found["decode"]["own"], found["decode"][which]
    _, page, share = which.split()
    return {
        "decoding": f"{own['sequences']} sequences of {own['context']:,} tokens",
        "pages of": page, "read": f"{float(share):.1%}",
        "FLASH_ATTN": f"{own['tokens_per_second']:,.0f} tokens/s",
        "dynaxx": f"{ours['tokens_per_second']:,.0f} tokens/s",
        "speed-up": f"{ours['tokens_per_second'] / own['tokens_per_second']:.2f}x",
        **losses(arguments, page, share),
    }  # fmt: skip


def losses(arguments: argparse.Namespace, page: str, share: str) -> dict[str, str]:
    """Return what the rule of a row loses on real weights, from the file of `benchmarks/quality/decoding.py`."""
    if not arguments.quality:
        return {}
    quality = json.loads(arguments.quality.read_text())
    text, tasks, long = (quality[f"{part} {page_sizes(page)[1]} {share}"] for part in ("text", "tasks", "long"))
    dense = quality["long dense"]
    return {
        "perplexity of the dense model's text": f"{text['rise']:+.1%} ± {text['error']:.1%}",
        "equal greedy tokens": f"{text['agreement']:.1%}",
        "nats per token of tasks' answers": f"{tasks['lost']:+.3f} ± {tasks['error']:.3f}",
        "dense loss of its own long text, first and last quarter": f"{long['first']:.2f}, {long['last']:.2f}"
        f" (dense {dense['first']:.2f}, {dense['last']:.2f})",
        "8-grams repeated": f"{long['repeated']:.1%} (dense {dense['repeated']:.1%})",
    }


def tables(found: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return rows and bars of medians."""
    if found.get("decode"):
        return dict(zip(("rows", "bars"), decode_rows(found, arguments), strict=True))
    rows, bars, asked = [], [], {turn for turn, _, _ in found["runs"]}
    for tokens in sorted({tokens for _, tokens, _ in found["runs"]}, reverse=True):
        times = {turn: [s for other, n, s in found["runs"] if (other, n) == (turn, tokens)] for turn in TURNS}
        own, *ours = (statistics.median(times[turn] or [0.0]) for turn in TURNS)
        row = {"tokens": f"{tokens:,}", "prompts each": len(times["own"]), "FLASH_ATTN": spread(times["own"])}
        for turn, seconds, title, gain in zip(TURNS[1:], ours, TITLES, GAINS, strict=True):
            if turn not in asked:
                continue
            row |= {title: span(seconds) if seconds else "", gain: f"{own / seconds:.2f}x" if seconds else ""}
            if tokens in TARGETS and seconds:
                what = "" if title == "dynaxx" else f", {title}"
                bars.append(bar(f"first token of {tokens:,} tokens{what}", TARGETS[tokens], own / seconds))
        rows.append(row)
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
    parser.add_argument(
        "--lengths",
        type=option_types.several(option_types.count),
        default="131072,32768,8192,1000",
        help="prompts, in tokens",
    )
    parser.add_argument(
        "--kernels",
        type=option_types.several(option_types.count, empty=True),
        default=[],
        help="lengths of prompts to profile after the first round, on a GPU",
    )
    parser.add_argument("--wait-for", default="", help="a file; prompts begin when it is there")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute on the host at the end")
    parser.add_argument(
        "--turns",
        type=option_types.several(option_types.one_of(TURNS)),
        default="own,dynaxx,tenth",
        help=f"some of {', '.join(TURNS)}",
    )
    parser.add_argument("--apart", action="store_true", help="one engine after the other")
    parser.add_argument(
        "--decode", type=option_types.sequences, metavar="SEQUENCESxTOKENS", help="measure decoding; implies --apart"
    )
    parser.add_argument(
        "--pages",
        type=option_types.several(option_types.pages),
        default="16,64,128",
        help="sizes of pages for --decode, as 64 or 64/16",
    )
    parser.add_argument(
        "--read",
        type=option_types.several(option_types.share),
        default="0.125",
        help="shares of the pages that decode rules read in all",
    )
    parser.add_argument("--quality", type=Path, metavar="FILE", help="of quality/decoding.py, for --tables of --decode")
    parser.add_argument("--steps", type=int, default=60, help="decoded tokens that are timed")
    parser.add_argument("--start", default="compile", choices=("compile", "graphs", "eager"))
    parser.add_argument("--layers", type=int, default=0, help="another number of layers than the shape's")
    parser.add_argument("--quantization", default="", help="of weights, such as fp8")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--shape", default="8b", choices=tuple(SHAPES))
    parser.add_argument("--max-model-len", type=int, default=0, help="by default what the prompts need")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step")
    parser.add_argument(
        "--cache", type=int, default=0, help="bytes of the cache of each engine; by default what is needed"
    )
    parser.add_argument("--out", default="turns.json", help="a JSON file; logs go beside it")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="results to read; starts nothing")
    for hidden, kind in {"worker": str, "sequences": int, "context": int, "page": str, "share": float}.items():
        parser.add_argument(f"--{hidden}", type=kind, default=kind(), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tables:
        found = tables(json.loads(arguments.tables.read_text()), arguments)
        Path(arguments.out).write_text(json.dumps(found, indent=1))
        return
    if arguments.worker:
        work(arguments.worker, arguments)
        return
    if arguments.decode:
        arguments.apart = True
        arguments.sequences, arguments.context = arguments.decode
    fit(arguments)
    (measure_apart if arguments.apart else measure)(arguments)


if __name__ == "__main__":
    main()
