# SPDX-License-Identifier: Apache-2.0
"""Compare greedy tokens in vLLM on a GPU: its own attention and policies, in the ways that a server runs.

    python benchmarks/serving/vllm_tokens.py --out tokens.json
    python benchmarks/serving/vllm_tokens.py --only fp8 --out tokens.json

Engines of `ENGINES` serve a small random model, SmolLM2, or random weights of Llama-3.1-8B's shape ("8B"), each in a
process of its own, those of a pair at the same time on the same GPU. A pair's engines must agree: `own` is vLLM's
attention, `every key` a policy of density 1.0, `sparse` one that chooses. Where tokens differ, the difference of the
two best log-probabilities there says whether it was a tie. `own` beside `own, other chunks` shows how far vLLM's
attention differs from itself when prompts are cut elsewhere, `own` beside `TRITON_ATTN` how far two exact kernels of
vLLM differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from vllm_gpu import PAGE, Result, prompt, save_model, save_policy, start

LENGTHS = (3, 17, 127, 128, 129, 300, 511, 599, 601, 700, 900, 1000, 1300, 1500, 2000, 2047, 2500, 3000, 3500, 3900)
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
SHARED = {"enable_prefix_caching": True}
FP8 = {"kv_cache_dtype": "fp8"}
SMALL_CACHE = {"kv_cache_memory_bytes": 12 << 20}
OTHER_CHUNKS = {"max_num_batched_tokens": 640}
SCARCE = {"num_gpu_blocks_override": 52, "disable_log_stats": False}  # pages for eight prompts, but not their answers
COMPILED = {"enforce_eager": False}
TWO_GPUS = {"tensor_parallel_size": 2, "worker_extension_cls": "dynaxx.integrations.vllm.WorkerExtension"}
LONG = 300  # tokens of an answer
MIDDLE = tuple(range(600, 1000, 20))  # lengths of prompts with long answers
GEMMA = {"attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}}


class Engine(NamedTuple):
    """An engine to compare: its attention backend, its policy, and its options."""

    policy: str = ""  # vLLM's own attention if empty
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    family: str = "llama"
    shared_prefix: bool = False  # every prompt begins as the longest one does
    answer: int = 24  # tokens
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


ENGINES = {
    "own": Engine(),
    "every key": Engine("everything"),
    "sparse": Engine("sparse"),
    "sparse, graphs": Engine("sparse", GRAPHS),
    "sparse, Triton's launches": Engine("sparse", environment={"DYNAXX_LAUNCH_LISTS": "0"}),
    "sparse, small cache": Engine("sparse", SMALL_CACHE),
    "own, shared prefixes": Engine("", SHARED, shared_prefix=True),
    "every key, shared prefixes": Engine("everything", SHARED, shared_prefix=True),
    "own, fp8 cache": Engine("", FP8),
    "every key, fp8 cache": Engine("everything", FP8),
    "own, Gemma 2": Engine(family="gemma2"),
    "every key, Gemma 2": Engine("everything", GEMMA, family="gemma2"),
    "own, long answers": Engine(answer=LONG),
    "own, preempted": Engine("", SCARCE, answer=LONG),
    "every key, preempted": Engine("everything", SCARCE, answer=LONG),
    "sparse, preempted": Engine("sparse", SCARCE, answer=LONG),
    "own, sinks": Engine(family="sinks"),
    "own, sinks, other chunks": Engine("", OTHER_CHUNKS, family="sinks"),
    "every key, sinks": Engine("everything", GEMMA, family="sinks"),
    "sparse, sinks": Engine("sparse", GEMMA, family="sinks"),
    "sparse, sinks, graphs": Engine("sparse", GEMMA | GRAPHS, family="sinks"),
    "own, SmolLM2": Engine(family="smollm2"),
    "own, SmolLM2, other chunks": Engine("", OTHER_CHUNKS, family="smollm2"),
    "every key, SmolLM2": Engine("everything", family="smollm2"),
    "every key, SmolLM2, graphs": Engine("everything", GRAPHS, family="smollm2"),
    "own, SmolLM2, compiled": Engine("", COMPILED, family="smollm2"),
    "every key, SmolLM2, compiled": Engine("everything", COMPILED, family="smollm2"),
    "sparse, SmolLM2": Engine("sparse", family="smollm2"),
    "sparse, SmolLM2, graphs": Engine("sparse", GRAPHS, family="smollm2"),
    "own, 8B": Engine(family="8b"),
    "own, 8B, other chunks": Engine("", OTHER_CHUNKS, family="8b"),
    "own, 8B, TRITON_ATTN": Engine("", {"attention_backend": "TRITON_ATTN"}, family="8b"),
    "every key, 8B": Engine("everything", family="8b"),
    "sparse, two GPUs": Engine("sparse", TWO_GPUS),
    "own, two GPUs": Engine("", {"tensor_parallel_size": 2}),
}
PAIRS = (
    ("own", "every key"), ("own", "sparse"), ("sparse", "sparse, graphs"), ("sparse", "sparse, small cache"),
    ("sparse", "sparse, Triton's launches"),
    ("own, shared prefixes", "every key, shared prefixes"), ("own, fp8 cache", "every key, fp8 cache"),
    ("own, Gemma 2", "every key, Gemma 2"),
    ("own, long answers", "own, preempted"), ("own, long answers", "every key, preempted"),
    ("every key, preempted", "sparse, preempted"),
    ("own, sinks", "own, sinks, other chunks"), ("own, sinks", "every key, sinks"),
    ("sparse, sinks", "sparse, sinks, graphs"),
    ("own, SmolLM2", "own, SmolLM2, other chunks"), ("own, SmolLM2", "every key, SmolLM2"),
    ("own, SmolLM2", "every key, SmolLM2, graphs"), ("own, SmolLM2, compiled", "every key, SmolLM2, compiled"),
    ("sparse, SmolLM2", "sparse, SmolLM2, graphs"),
    ("own, 8B", "own, 8B, other chunks"), ("own, 8B", "own, 8B, TRITON_ATTN"), ("own, 8B", "every key, 8B"),
    ("own", "own, two GPUs"), ("sparse", "sparse, two GPUs"),
)  # fmt: skip


def run_tokens(arguments: argparse.Namespace) -> None:
    """Compare greedy tokens of pairs of engines. Those on one GPU run at the same time, those on two one by one."""
    result, folder = Result(arguments.out), Path(tempfile.mkdtemp())
    pairs = [pair for pair in PAIRS if any(part in " / ".join(pair) for part in arguments.only.split(";"))]
    names = sorted({name for pair in pairs for name in pair}, key=list(ENGINES).index)
    alone = [name for name in names if "two GPUs" in name]
    if arguments.one_gpu:
        names, alone = [name for name in names if name not in alone], []
    found: dict[str, Any] = {}
    for group in ([name for name in names if name not in alone], *([name] for name in alone)):
        started: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in group:
                at = names.index(name)
                command = [sys.executable, __file__, "--engine", name, "--out", str(folder / f"{at}.json")]
                with (folder / f"{at}.log").open("w") as log:
                    environment = {**os.environ, **ENGINES[name].environment}
                    started[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            for name, process in started.items():
                at = names.index(name)
                if process.wait() == 0:
                    case = json.loads((folder / f"{at}.json").read_text())
                    found[name] = case.pop("outputs")
                    result.add(**{name: case})
                else:
                    print(f"{name} failed\n{(folder / f'{at}.log').read_text()[-4000:]}", flush=True)
        finally:
            for process in started.values():
                process.kill()
    result.add(same_tokens={f"{a} / {b}": compare(found[a], found[b]) for a, b in pairs if a in found and b in found})


def run_engine(arguments: argparse.Namespace) -> None:
    """Generate with one of `ENGINES`."""
    import torch
    from vllm import SamplingParams

    engine = ENGINES[arguments.engine]
    folder, cuda = Path(tempfile.mkdtemp()), torch.cuda.is_available()
    model = model_of(engine.family, folder / "model", "bfloat16" if cuda else "float32")
    path = policy_of(engine, model, folder / "policy.json") if engine.policy else None
    lengths = (MIDDLE if engine.answer == LONG else LENGTHS)[: arguments.prompts]
    options: dict[str, Any] = {"enforce_eager": True, "max_model_len": 4096, "max_num_batched_tokens": 1024,
                               "max_num_seqs": 8}  # fmt: skip
    if cuda:
        options |= {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 1 << 30, "block_size": PAGE}
    else:
        options["dtype"] = "float32"
    if cuda and engine.family == "smollm2":
        options["dtype"] = "float16"  # whose steps are eight times finer than bfloat16's
    if cuda or "enforce_eager" not in engine.options:
        options |= engine.options
    if engine.family == "8b":
        options["load_format"] = "dummy"
    begun = time.perf_counter()
    llm = start(model, "dynaxx" if engine.policy else "own", path, **options)
    if engine.family == "8b":
        llm.apply_model(fill_weights)
    started = time.perf_counter() - begun
    parameters = SamplingParams(max_tokens=engine.answer, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
    prompts = prompts_of(engine, model, lengths)
    outputs, cached = [], 0
    for _ in range(2 if engine.shared_prefix else 1):  # the second time whole prompts are in the cache
        answers = llm.generate(prompts, parameters, use_tqdm=False)
        outputs += [(list(each.outputs[0].token_ids), ranked(each.outputs[0].logprobs)) for each in answers]
        cached += sum(each.num_cached_tokens or 0 for each in answers)
    answer = {"start_s": started, "s": time.perf_counter() - begun - started, "cached_tokens": cached,
              "outputs": outputs, **preemptions_of(llm, engine), **calls_of(llm, engine)}  # fmt: skip
    Path(arguments.out).write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may outlive its engine


def model_of(family: str, folder: Path, dtype: str) -> Path:
    """Return the folder of a model."""
    if family == "smollm2":
        from dynaxx.lab.models import resolve_model

        return Path(resolve_model("smollm2"))
    if family == "8b":
        return save_model(folder, "8b", dtype)
    model = save_model(folder, "small", dtype, family)
    fill_model(model)
    if family == "sinks":
        import vllm_sinks

        vllm_sinks.add_sinks(model)
        vllm_sinks.register()
    return model


def policy_of(engine: Engine, model: Path, path: Path) -> Path:
    """Write the policy of an engine."""
    if engine.family != "smollm2":
        shape, family = ("8b", "llama") if engine.family == "8b" else ("small", engine.family)
        return save_policy(path, shape, engine.policy, family)
    import transformers

    import dynaxx as dx
    from dynaxx.integrations.transformers.loading import from_folder
    from dynaxx.policy import ModelFacts

    prefill: Any = dx.SlidingWindow(64) | dx.TopK(1.0)
    decode: Any = dx.TopK(1.0)
    if engine.policy == "sparse":
        prefill, decode = (dx.SlidingWindow(256) | dx.Sink(128) | dx.TopK(each) for each in (0.3, 4))
    rules = (dx.Rule.of(prefill), dx.Rule.of(decode, phase="decode", block_size=PAGE))
    facts = ModelFacts.of(from_folder(transformers.AutoConfig, model))
    dx.save_policy(dx.Policy(model=facts, block_size=128, rules=rules), path)
    return path


def prompts_of(engine: Engine, model: Path, lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """Draw prompts: random tokens, or for SmolLM2 pieces of Python's documentation."""
    draw = random.Random(0)
    if engine.family == "smollm2":
        import transformers

        from dynaxx.integrations.transformers.loading import from_folder
        from dynaxx.lab.texts import pydoc_text

        ids = from_folder(transformers.AutoTokenizer, model)(pydoc_text(), add_special_tokens=False)["input_ids"]
        starts = [(draw.randrange(len(ids) - n), n) for n in lengths]
        return [{"prompt_token_ids": ids[at : at + n]} for at, n in starts]
    longest = prompt(draw, LENGTHS[-1])["prompt_token_ids"]
    cut = lambda n: {"prompt_token_ids": longest[: n * 3 // 4] + prompt(draw, n - n * 3 // 4)["prompt_token_ids"]}
    return [cut(n) if engine.shared_prefix else prompt(draw, n) for n in lengths]


def preemptions_of(llm: Any, engine: Engine) -> dict[str, Any]:
    """Return how often vLLM put a request back for lack of pages, by its metric, if the engine keeps metrics."""
    if engine.options.get("disable_log_stats", True):
        return {}
    return {"preemptions": sum(each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions")}


def calls_of(llm: Any, engine: Engine) -> dict[str, Any]:
    """Return the plugin's counts of calls, per worker under tensor parallelism."""
    if not engine.policy:
        return {}
    from dynaxx.integrations.vllm import status

    count = lambda found: {key: value for key, value in found.items() if "calls" in key or "sequences" in key}
    if "tensor_parallel_size" in engine.options:
        return {"workers": [count(found) for found in llm.collective_rpc("dynaxx_status")]}
    return count(status())


def fill_model(folder: Path) -> None:
    """Write random weights whose tokens differ clearly, the same in every process."""
    import torch
    import transformers

    from dynaxx.integrations.transformers.loading import from_config, from_folder

    torch.manual_seed(0)
    config = from_folder(transformers.AutoConfig, folder, initializer_range=0.1)
    from_config(transformers.AutoModelForCausalLM, config, dtype=torch.bfloat16).save_pretrained(folder)


def fill_weights(model: Any) -> None:
    """Replace vLLM's tiny dummy weights by random ones whose tokens differ clearly, the same in every process."""
    import torch

    draw: torch.Generator | None = None
    for weights in model.parameters():
        if draw is None:
            draw = torch.Generator(weights.device).manual_seed(0)
        if weights.ndim < 2:
            weights.data.fill_(1)  # of norms
        else:
            weights.data.uniform_(-0.03, 0.03, generator=draw)


def ranked(logprobs: Any) -> list[list[float]]:
    """Return the log-probabilities of each token's best candidates, best first."""
    return [sorted((each.logprob for each in at.values()), reverse=True) for at in logprobs]


def compare(mine: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Count prompts with equal tokens; for the others, return how far apart the two best tokens were there."""
    same, margins, differences = 0, [], []
    for (tokens, best), (others, other_best) in zip(mine, theirs, strict=True):
        first = next((at for at, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), None)
        until = len(tokens) if first is None else first
        differences += [abs(best[at][0] - other_best[at][0]) for at in range(until)]
        if first is None:
            same += 1
        else:
            margins.append(round(best[first][0] - best[first][1], 5))
    return {"prompts": len(mine), "same": same, "margins_where_not": margins,
            "largest_logprob_difference": max(differences, default=0.0)}  # fmt: skip


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table's rows of the results of some pairs."""
    table = []
    for pair, case in found["same_tokens"].items():
        preempted = [str(int(found[name]["preemptions"])) for name in pair.split(" / ") if "preemptions" in found[name]]
        table.append({
            "pair": pair.replace(" / ", " beside "), "prompts": case["prompts"], "same tokens": case["same"],
            "largest margin where they differ": max(case["margins_where_not"], default=None),
            "largest difference of log-probabilities before": f"{case['largest_logprob_difference']:.2g}",
            "preemptions": ", ".join(preempted),
        })  # fmt: skip
    return table


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(ENGINES), help="one engine")
    parser.add_argument(
        "--only", default="", help="pairs whose names contain this, or one of several, with ; between them"
    )
    parser.add_argument("--one-gpu", action="store_true", help="leave out the pairs that need two")
    parser.add_argument("--prompts", type=int, default=len(LENGTHS), help="the shortest so many, of one engine")
    parser.add_argument("--out", default="", help="a JSON file")
    parser.add_argument("--tables", nargs="+", type=Path, metavar="FILE", help="start nothing; rows of such results")
    arguments = parser.parse_args()
    if arguments.tables:
        table = [row for path in arguments.tables for row in rows(json.loads(path.read_text()))]
        Path(arguments.out).write_text(json.dumps({"rows": table}, indent=1))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine outlives this program
    (run_engine if arguments.engine else run_tokens)(arguments)


if __name__ == "__main__":
    main()
