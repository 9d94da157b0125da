# SPDX-License-Identifier: Apache-2.0
"""Time what a handle costs a small model: passes over a prompt with and without it, in turns.

    python benchmarks/serving/policy_cost.py [--lengths 256,1024,8192] [--passes 60] [--dense-below 2048] [--json FILE]

SmolLM2-135M's shape with random weights, bf16, on a GPU. Models share the weights: one as it is, one more as it is,
which shows how far two equal models differ, one with a policy, and one with `dynaxx.apply(model)`. Each turn runs every
model once, in random order. Printed are the median milliseconds of a pass, the median of the differences within a turn,
and the same of the CPU time of the thread, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.machine import need_gpu

RULE = dx.SlidingWindow(1024) | dx.Sink(128) | dx.TopK(0.1)
WARM_UP = 6  # turns that are not counted


class Pass(NamedTuple):
    """The milliseconds of a pass."""

    wall: float  # until the GPU has finished
    thread: float  # CPU time until the model returns


def make_model() -> Any:
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=1 << 17, attn_implementation="sdpa", tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def twin(model: Any) -> Any:
    """Copy a model: the same weights in new modules with a new config."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def timed_pass(model: Any, ids: torch.Tensor) -> Pass:
    torch.cuda.synchronize()
    started, thread = time.perf_counter(), time.thread_time()
    with torch.inference_mode():
        model(ids, logits_to_keep=1, use_cache=True)
    thread = time.thread_time() - thread
    torch.cuda.synchronize()
    return Pass((time.perf_counter() - started) * 1e3, thread * 1e3)


def in_turns(models: dict[str, Any], tokens: int, turns: int) -> dict[str, Any]:
    """Return the medians of each model, and of the differences to the first within a turn."""
    ids = torch.randint(0, 49152, (1, tokens), device="cuda")
    taken: dict[str, list[Pass]] = {name: [] for name in models}
    order, draw = list(models), random.Random(0)
    for _ in range(turns + WARM_UP):
        draw.shuffle(order)
        for name in order:
            taken[name].append(timed_pass(models[name], ids))
    taken = {name: times[WARM_UP:] for name, times in taken.items()}
    first, *others = models
    found: dict[str, Any] = {"tokens": tokens, "load": round(os.getloadavg()[0], 1)}
    for kind in Pass._fields:
        of = {name: [getattr(each, kind) for each in times] for name, times in taken.items()}
        found[f"{kind}_ms"] = {name: round(median(times), 3) for name, times in of.items()}
        found[f"{kind}_ms_more"] = {
            name: round(median(b - a for a, b in zip(of[first], of[name], strict=True)), 3) for name in others
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="256,1024,8192")
    parser.add_argument("--passes", type=int, default=60, help="of each model over each length")
    parser.add_argument("--dense-below", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    need_gpu()
    torch.set_num_threads(1)
    models = {"dense": make_model()}
    models |= {name: twin(models["dense"]) for name in ("again", "policy", "own pattern")}
    facts = model_facts(models["policy"])
    policy = dx.Policy(model=facts, block_size=64, dense_below=given.dense_below, rules=[dx.Rule.of(RULE)])
    handles = {"policy": dx.apply(models["policy"], policy), "own pattern": dx.apply(models["own pattern"])}
    rows = []
    for tokens in map(int, given.lengths.split(",")):
        row = in_turns(models, tokens, given.passes)
        rows.append(row)
        for kind in Pass._fields:
            dense, more = row[f"{kind}_ms"]["dense"], row[f"{kind}_ms_more"]
            said = ", ".join(f"{name} {ms:+.3f} ({ms / dense:+.1%})" for name, ms in more.items())
            print(f"{tokens} tokens, {kind} ms: dense {dense:.2f}, {said}; load {row['load']}", flush=True)
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        machine |= {"transformers": transformers.__version__, "cpus": str(os.cpu_count())}
        stats = {name: handle.stats() for name, handle in handles.items()}
        if given.json:
            known = {**machine, "rule": repr(RULE), "stats": stats, "rows": rows}
            given.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {RULE}; {stats}")


if __name__ == "__main__":
    main()
