# SPDX-License-Identifier: Apache-2.0
"""Decode after a long prompt with dense attention and with a decode rule, and print tokens per second.

    python examples/generate_long.py [--tokens 4000] [--new 48] [--budget 0.1]    # SmolLM2-135M, CPU

The prompt is Python's own documentation. Every layer reads the first and the last tokens and the best pages of 32
tokens in between. Printed: tokens per second after the prompt, dense and sparse, the share of equal tokens, both texts.
"""

import argparse
import time
from itertools import pairwise

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.models import load_model
from dynaxx.lab.texts import pydoc_text


def generate(model, ids, new):
    """Generate tokens; return them and the seconds that each took after the prompt."""
    moments = []

    class Clock:
        def put(self, tokens):
            moments.append(time.perf_counter())

        def end(self):
            pass

    out = model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=Clock(), cache_implementation="static"
    )
    steps = [after - before for before, after in pairwise(moments[1:])]  # the prompt and its token come first
    return out[0, ids.shape[1] :], sorted(steps)[len(steps) // 2]


def main():
    """Generate twice, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--budget", type=float, default=0.1)
    args = parser.parse_args()
    model, tokenizer = load_model("smollm2")
    ids = torch.tensor([tokenizer(pydoc_text())["input_ids"][: args.tokens]])
    rule = dx.Sink(32) | dx.SlidingWindow(128) | dx.TopK(args.budget, dx.MinMax(bound=0.5))
    policy = dx.Policy(model=model_facts(model), rules=(dx.Rule.of(rule, phase="decode", block_size=32),))
    dense, dense_seconds = generate(model, ids, args.new)
    with dx.apply(model, policy) as handle:
        sparse, sparse_seconds = generate(model, ids, args.new)
        calls = handle.stats()
    print(f"prompt of {ids.shape[1]} tokens; {args.new} new ones; {torch.get_num_threads()} threads; {calls}")
    print(f"dense  {1 / dense_seconds:6.1f} tokens/s")
    print(f"sparse {1 / sparse_seconds:6.1f} tokens/s, {dense_seconds / sparse_seconds:.2f}x")
    print(f"equal tokens: {float((dense == sparse).float().mean()):.0%}")
    print("dense: ", repr(tokenizer.decode(dense)))
    print("sparse:", repr(tokenizer.decode(sparse)))


if __name__ == "__main__":
    main()
