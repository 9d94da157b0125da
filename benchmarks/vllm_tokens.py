# SPDX-License-Identifier: Apache-2.0
"""Compare greedy tokens in vLLM on a GPU: its own attention, a policy of density 1.0, a sparse policy in CUDA graphs.

    python benchmarks/vllm_tokens.py --out tokens.json

Four engines serve a small random model, each in a process of its own, all at the same time. Where two of them disagree,
the difference of the two best log-probabilities there says whether it was a tie.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_gpu import PAGE, Result, prompt, save_model, save_policy, start

CASES = {
    "own": ("own", "", True),
    "density 1": ("dynaxx", "everything", True),
    "sparse, eager": ("dynaxx", "sparse", True),
    "sparse, graphs": ("dynaxx", "sparse", False),
}  # which engine, its policy, whether eager
LENGTHS = (3, 17, 127, 128, 129, 300, 511, 599, 601, 700, 900, 1000, 1300, 1500, 2000, 2047, 2500, 3000, 3500, 3900)


def run_tokens(arguments: argparse.Namespace) -> None:
    """Compare greedy tokens of four engines, each in a process of its own, at the same time."""
    result, folder = Result(arguments.out), Path(tempfile.mkdtemp())
    started = {}
    for at, name in enumerate(CASES):
        command = [sys.executable, __file__, "--case", name, "--out", str(folder / f"{at}.json")]
        with (folder / f"{at}.log").open("w") as log:
            started[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    found: dict[str, Any] = {}
    for at, (name, process) in enumerate(started.items()):
        if process.wait() == 0:
            case = json.loads((folder / f"{at}.json").read_text())
            found[name] = case.pop("outputs")
            result.add(**{name: case})
        else:
            print(f"{name} failed\n{(folder / f'{at}.log').read_text()[-4000:]}", flush=True)
    pairs = (("own", "density 1"), ("own", "sparse, eager"), ("sparse, eager", "sparse, graphs"))
    result.add(same_tokens={f"{a} / {b}": compare(found[a], found[b]) for a, b in pairs if a in found and b in found})


def run_case(arguments: argparse.Namespace) -> None:
    """Generate with one of `CASES`."""
    import torch
    from vllm import SamplingParams

    which, policy, eager = CASES[arguments.case]
    folder, draw, cuda = Path(tempfile.mkdtemp()), random.Random(0), torch.cuda.is_available()
    model = save_model(folder / "model", "small", "bfloat16" if cuda else "float32")
    fill_model(model)
    path = save_policy(folder / "policy.json", "small", policy) if policy else None
    options: dict[str, Any] = {"enforce_eager": eager or not cuda}
    if cuda:
        options |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30, "block_size": PAGE}
    if cuda and not eager:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    begun = time.perf_counter()
    llm = start(model, which, path, max_model_len=4096, max_num_batched_tokens=1024, max_num_seqs=8, **options)
    started = time.perf_counter() - begun
    parameters = SamplingParams(max_tokens=24, temperature=0, logprobs=2, detokenize=False, ignore_eos=True)
    prompts = [prompt(draw, n) for n in LENGTHS[: arguments.prompts]]
    found = llm.generate(prompts, parameters, use_tqdm=False)
    outputs = [(list(each.outputs[0].token_ids), ranked(each.outputs[0].logprobs)) for each in found]
    calls = {}
    if path is not None:
        from dynaxx.integrations.vllm import status

        calls = {key: value for key, value in status().items() if "calls" in key or "sequences" in key}
    answer = {"start_s": started, "s": time.perf_counter() - begun - started, "outputs": outputs, **calls}
    Path(arguments.out).write_text(json.dumps(answer))


def fill_model(folder: Path) -> None:
    """Write random weights whose tokens differ clearly, the same in every process."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder, initializer_range=0.1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def ranked(logprobs: Any) -> list[list[float]]:
    """Return the log-probabilities of each token's best candidates, best first."""
    return [sorted((each.logprob for each in at.values()), reverse=True) for at in logprobs]


def compare(mine: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """How many prompts have the same tokens, and for the others by how much the two best tokens differed there."""
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


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(CASES), help="one engine")
    parser.add_argument("--prompts", type=int, default=len(LENGTHS), help="the shortest so many, of one engine")
    parser.add_argument("--out", default="", help="a JSON file")
    arguments = parser.parse_args()
    (run_case if arguments.case else run_tokens)(arguments)


if __name__ == "__main__":
    main()
