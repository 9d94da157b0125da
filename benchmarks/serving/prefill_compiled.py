# SPDX-License-Identifier: Apache-2.0
"""Time a model in eager mode, compiled, and as captured CUDA graphs, dense and under a policy: prompts or training.

    python benchmarks/serving/prefill_compiled.py [--model smollm2] [--lengths 1024,2048,4096,8192] [--turns 9]
        [--only graph] [--train] [--dense-below 512] [--wait-for FILE] [--json FILE]

SmolLM2-135M's shape, or four layers of Llama-3.1-8B's, with random weights, bf16, on a GPU. A compiled model is one
graph without breaks (`fullgraph`). A captured graph serves one length, or every prompt up to it: shorter prompts are
padded on the right, and the logits of their last token are taken. Before anything is timed, the logits of each way must
be those of the eager model, up to rounding; random weights and rounding choose other blocks now and then, so a compiled
policy is compared with a static rule. `equal` says whether those of a prompt of the whole length are equal bit by bit.
With `--wait-for`, several runs compile side by side, and each is timed when its file appears.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from policy_cost import RULE, make_model, twin
from transformers import LlamaConfig, LlamaForCausalLM

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.machine import need_gpu

WAYS = ("eager", "compiled", "graph")
STATIC = dx.SlidingWindow(1024) | dx.Sink(128)
MAX_APART = 0.1  # standard deviations of the logits; products of other lengths round otherwise in bf16


def make_llama8b() -> Any:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=49152, max_position_embeddings=1 << 17, attn_implementation="sdpa", dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


MODELS = {"smollm2": make_model, "llama8b": make_llama8b}


class CapturedPrompt:
    """A captured forward pass over prompts of up to `length` tokens."""

    def __init__(self, model: Any, length: int) -> None:
        self.ids = torch.zeros(1, length, dtype=torch.long, device="cuda")
        self.last = torch.full((1,), length - 1, device="cuda")
        run = lambda: model(self.ids, logits_to_keep=self.last, use_cache=True).logits
        for _ in range(3):  # compiles, and records the launches of layers
            run()
        self.equal = False
        self.graph = torch.cuda.CUDAGraph()
        # While a graph is captured, transformers would give SDPA a mask instead of its faster causal kernel.
        with patch("transformers.masking_utils.is_tracing", lambda *given: False), torch.cuda.graph(self.graph):
            self.logits = run()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the prompt's last token, valid until the next call."""
        self.ids[:, : ids.shape[1]].copy_(ids)
        self.last.fill_(ids.shape[1] - 1)
        self.graph.replay()
        return self.logits


def ways_of(
    model: Any, length: int, only: str | None, handle: Any
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the ways to run a model on a prompt, each checked against eager mode."""
    eager = lambda ids: model(ids, logits_to_keep=1, use_cache=True).logits
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"eager": eager}
    ids = torch.randint(0, 49152, (1, length), device="cuda")
    if only in (None, "compiled"):
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        found["compiled"] = lambda ids: compiled(ids, logits_to_keep=1, use_cache=False).logits
        if handle is not None:
            policy = handle.policy
            handle.replace(policy_of(model, policy.dense_below, STATIC))
        compare("compiled", found["compiled"](ids), eager(ids), 5 * MAX_APART)  # its fused operations round otherwise
        if handle is not None:
            handle.replace(policy)
            found["compiled"](ids)
    if only in (None, "graph"):
        graph = found["graph"] = CapturedPrompt(model, length)
        part = ids[:, : length - 128]  # the last block has no padding, whose queries would take part in its choice
        for prompt in (part, ids):
            compare("captured", graph(prompt), eager(prompt))
        graph.equal = bool(torch.equal(graph(ids), eager(ids)))
    return found


def steps_of(model: Any, length: int) -> dict[str, Callable[[torch.Tensor], None]]:
    """Return training steps, forward and backward, in eager mode and compiled."""
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    found: dict[str, Callable[[torch.Tensor], None]] = {}
    for way, run in (("eager", model), ("compiled", compiled)):

        def step(ids: torch.Tensor, run: Any = run) -> None:
            run(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)

        step(torch.randint(0, 49152, (1, length), device="cuda"))
        found[way] = step
    return found


def policy_of(model: Any, dense_below: int, rule: Any = RULE) -> dx.Policy:
    return dx.Policy(model=model_facts(model), block_size=64, dense_below=dense_below, rules=[dx.Rule.of(rule)])


def compare(way: str, logits: torch.Tensor, wanted: torch.Tensor, most: float = MAX_APART) -> None:
    """Stop if logits differ from those of eager mode by more than `most` standard deviations."""
    apart = float((logits - wanted).abs().max() / wanted.float().std())
    print(f"{way}, {logits.shape}: {apart:.4f} standard deviations from eager mode", flush=True)
    if apart > most:
        raise SystemExit(f"error: the logits of a {way} prompt differ by {apart:.3f} standard deviations")


def time_ms(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def prepared(
    models: dict[str, Any], length: int, given: argparse.Namespace, handle: Any
) -> dict[str, dict[str, Callable[[torch.Tensor], Any]]]:
    """Return the ways to run each model on `length` tokens, compiled."""
    handles = {"dense": None, "policy": handle}
    if given.train:
        return {name: dict(steps_of(model.train(), length)) for name, model in models.items()}
    return {name: dict(ways_of(model, length, given.only, handles[name])) for name, model in models.items()}


def rows_of(
    runs: dict[str, dict[str, Callable[[torch.Tensor], Any]]], length: int, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one row per way: milliseconds dense and under the policy, in turns."""
    ids = torch.randint(0, 49152, (1, length), device="cuda")
    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(given.turns + 2):
        for name, ways in runs.items():
            for way, run in ways.items():
                ms = time_ms(lambda run=run: run(ids))  # type: ignore[misc]
                if turn >= 2:
                    taken.setdefault((way, name), []).append(ms)
    rows = []
    for way in runs["dense"]:
        dense, sparse = (round(median(taken[way, name]), 2) for name in ("dense", "policy"))
        row = {"model": given.model, "tokens": length, "way": way, "dense_ms": dense, "policy_ms": sparse}
        row |= {"speedup": round(dense / sparse, 2), "load": round(os.getloadavg()[0], 1)}
        if given.train:
            row |= {f"{name}_gib": peak_gib(lambda name=name, way=way: runs[name][way](ids)) for name in runs}  # type: ignore[misc]
        elif way == "graph":
            row["equal"] = {name: getattr(ways[way], "equal", None) for name, ways in runs.items()}
        rows.append(row)
    return rows


def peak_gib(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", choices=WAYS[1:], help="beside eager mode, by default both")
    parser.add_argument("--train", action="store_true", help="time training steps instead of prompts")
    parser.add_argument("--dense-below", type=int, default=512)
    parser.add_argument("--wait-for", type=Path, metavar="FILE", help="compile, then time when this file exists")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    need_gpu()
    rows: list[dict[str, Any]] = []
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__}
    models = {"dense": MODELS[given.model]()}
    models["policy"] = twin(models["dense"])
    with (
        dx.apply(models["policy"], policy_of(models["policy"], given.dense_below)) as handle,
        torch.inference_mode(not given.train),
    ):
        lengths = [int(length) for length in given.lengths.split(",")]
        runs = {length: prepared(models, length, given, handle) for length in lengths}
        if given.wait_for is not None:
            print("compiled", flush=True)
            while not given.wait_for.exists():
                time.sleep(0.05)
        for length in lengths:
            for row in rows_of(runs[length], length, given):
                rows.append(row)
                print(json.dumps(row), flush=True)
            if given.json:
                given.json.write_text(json.dumps({**facts, "rule": repr(RULE), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
