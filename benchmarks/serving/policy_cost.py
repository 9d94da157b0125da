# SPDX-License-Identifier: Apache-2.0
"""Time what a policy costs a small model: passes over a prompt with and without it, in turns.

    python benchmarks/serving/policy_cost.py [--lengths 256,1024,8192] [--passes 60] [--dense-below 2048]

SmolLM2-135M's shape with random weights, bf16, on a GPU. Three models share the weights: one as it is, one more as it
is, which shows how far two equal models differ, and one with a policy. Printed are the median milliseconds of a pass,
and the median of the differences within a turn.
"""

from __future__ import annotations

import argparse
import copy
import time
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.machine import need_gpu

RULE = dx.SlidingWindow(1024) | dx.Sink(128) | dx.TopK(0.1)


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


def pass_ms(model: Any, ids: torch.Tensor) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.inference_mode():
        model(ids, logits_to_keep=1, use_cache=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="256,1024,8192")
    parser.add_argument("--passes", type=int, default=60, help="of each model over each length")
    parser.add_argument("--dense-below", type=int, default=2048)
    args = parser.parse_args()
    need_gpu()
    models = {"dense": make_model()}
    models |= {"again": twin(models["dense"]), "policy": twin(models["dense"])}
    facts = model_facts(models["policy"])
    policy = dx.Policy(model=facts, block_size=64, dense_below=args.dense_below, rules=[dx.Rule.of(RULE)])
    handle = dx.apply(models["policy"], policy)
    for tokens in map(int, args.lengths.split(",")):
        ids = torch.randint(0, 49152, (1, tokens), device="cuda")
        taken: dict[str, list[float]] = {name: [] for name in models}
        order = list(models)
        for turn in range(args.passes + 5):
            for name in order:
                taken[name].append(pass_ms(models[name], ids))
            order = order[1:] + order[:1] if turn % 2 else order[::-1]
        taken = {name: times[5:] for name, times in taken.items()}
        said = [f"{name} {median(times):.2f}" for name, times in taken.items()]
        for name in ("again", "policy"):
            more = median(b - a for a, b in zip(taken["dense"], taken[name], strict=True))
            said.append(f"{name} - dense {more:+.2f} ({more / median(taken['dense']):+.1%})")
        print(f"{tokens} tokens, ms: " + ", ".join(said), flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {RULE}; {handle.stats()}")


if __name__ == "__main__":
    main()
