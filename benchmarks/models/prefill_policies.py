# SPDX-License-Identifier: Apache-2.0
"""Time a whole prefill under several policies, beside dense.

    python benchmarks/models/prefill_policies.py smollm2 "32 x 32=run/policy.json" "16 x 16=other.json" --turns 3 --json

Passes run in turns. The fastest counts, because other processes only add time. `--threads 1 --layers 15` counts the CPU
seconds of one thread in the first layers, which other processes hardly disturb.
"""

import argparse
import contextlib
import json
import sys
import time

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import apply, model_facts
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import evaluating
from dynaxx.lab.texts import encode, load_text, started


def first_layers(model, policy, count):
    """Return a policy for the first layers of a model, from one for all."""
    rules = [
        dx.Rule(**{**rule.model_dump(), "layers": kept})
        for rule in policy.rules
        if (kept := tuple(layer for layer in rule.layer_list(policy.model.layers) if layer < count))
    ]
    return policy.replace(model=model_facts(model), rules=tuple(rules))


def timed(model, ids, policy):
    """Return (seconds, CPU seconds, density) of one prefill. CPU seconds are those of the only thread, or all."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    seen = []
    with contextlib.ExitStack() as stack:
        if policy is not None:
            handle = stack.enter_context(apply(model, policy))
            stack.enter_context(handle.watch(lambda _, layout: seen.append(layout)))
        begin, cpu = time.perf_counter(), clock()
        model(ids, use_cache=True, logits_to_keep=1)
        spent = time.perf_counter() - begin, clock() - cpu
    return *spent, sum(layout.density() for layout in seen) / len(seen) if seen else 1.0


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("policies", nargs="+", metavar="NAME=FILE", help="policies, each with a name for its row")
    parser.add_argument("--text", default="pydoc")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=None, help="run only so many first layers")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if not all("=" in each for each in args.policies):
        parser.error(f"policies must be NAME=FILE, got {args.policies}")
    named = (each.split("=", 1) for each in args.policies)
    ways = {"dense": None} | {name: dx.load_policy(path) for name, path in named}
    model, tokenizer = load_model(args.model)
    if args.layers:
        model.base_model.layers = model.base_model.layers[: args.layers]
        model.config.num_hidden_layers = args.layers
        ways = {name: each and first_layers(model, each, args.layers) for name, each in ways.items()}
    ids = started(tokenizer, encode(tokenizer, load_text(args.text), args.tokens))
    found = {name: [] for name in ways}
    with evaluating(model):
        for _ in range(args.turns):
            for name, each in ways.items():
                found[name].append(timed(model, ids, each))
                print(f"{name}: {found[name][-1][0]:.2f} s, {found[name][-1][1]:.2f} s of CPU", file=sys.stderr)
    rows = []
    for name, passes in found.items():
        seconds, cpu, density = (min(column) for column in zip(*passes, strict=True))
        dense = [min(column) for column in zip(*found["dense"], strict=True)]
        rows.append(
            {
                "way": name, "blocks": f"{density:.1%}", "seconds": seconds, "against dense": dense[0] / seconds,
                "CPU seconds": cpu, "CPU against dense": dense[1] / cpu,
            }
        )  # fmt: skip
    print(json.dumps({"rows": rows}) if args.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
