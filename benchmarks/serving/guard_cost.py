# SPDX-License-Identifier: Apache-2.0
"""Time the guard: in every call, in a sampled call, and in the background.

    OMP_NUM_THREADS=1 python benchmarks/serving/guard_cost.py --tokens 2048
    OMP_NUM_THREADS=1 python benchmarks/serving/guard_cost.py --tokens 8192 --json

One layer of SmolLM2's shape (9 query heads and 3 kv heads of 64) with random inputs on one core, in CPU time of the
thread that does the work, which neighbours on the machine hardly disturb; medians. A sampled call is copied on the way
of its request; then the background measures it, and one in four at other budgets, too (the ladder that `dynaxx retune`
reads). Both are held against the attention call itself, choosing its blocks included.
"""

import argparse
import json
import statistics
import time

import torch

import dynaxx as dx
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.guarding import LADDER_EVERY, LiveGuard
from dynaxx.policy import Guard, ModelFacts, Policy, Rule, resolve
from dynaxx.telemetry import Recorder


def seconds(run, repeats, inner=1):
    """Return the median CPU seconds of a run."""
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(inner):
            run()
        found.append((time.thread_time() - start) / inner)
    return statistics.median(found)


@torch.no_grad()
def measure(tokens, sample):
    """Return the figures by name."""
    torch.set_num_threads(1)
    facts = ModelFacts(model_type="llama", layers=1, q_heads=9, kv_heads=3, head_dim=64)
    rule = Rule.of(dx.Sink(4) | dx.SlidingWindow(256) | dx.TopK(0.2))
    policy = Policy(model=facts, rules=(rule,), block_size=32, guard=Guard(sample=sample))
    plan = resolve(policy)[0]
    background = Background(print)
    latest = []

    def submit(job):  # to be run, and timed, on this thread
        latest[:] = [job]
        return True

    background.submit = submit
    guard = LiveGuard(policy, {0: plan}, Recorder(strict=True), background)
    q = torch.randn(1, 9, tokens, 64).transpose(1, 2)
    k, v = (torch.randn(1, 3, tokens, 64).transpose(1, 2) for _ in range(2))
    out = dx.sparse_attention(q, k, v, plan.layout(q, k))
    take = lambda: guard.take(0, q, k, v, None, plan, plan, out)
    times = {
        "attention": seconds(lambda: dx.sparse_attention(q, k, v, plan.layout(q, k)), 7),
        "every call": seconds(guard.wants_call, 7, inner=10_000),
        "sampled call": seconds(take, 7),
    }
    measured = []
    for job in latest * (2 * LADDER_EVERY):  # the first of four with the ladder
        start = time.thread_time()
        job()
        measured.append(time.thread_time() - start)
    times["in the background"] = statistics.mean(measured)
    return times


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--sample", type=float, default=Guard().sample)
    options.add_argument("--json", action="store_true")
    options = options.parse_args()
    times = measure(options.tokens, options.sample)
    attention = times["attention"]
    on_the_way = (times["every call"] + options.sample * times["sampled call"]) / attention
    beside = options.sample * times["in the background"] / attention
    if options.json:
        shares = {"on_the_way": on_the_way, "beside": beside}
        print(json.dumps({"tokens": options.tokens, "sample": options.sample, "seconds": times, "shares": shares}))
        return
    print(f"{options.tokens} tokens, one core:")
    for name, value in times.items():
        print(f"  {name:<18} {1e3 * value:10.4f} ms  {value / attention:8.3%} of the attention call")
    print(f"at sample {options.sample:g}: {on_the_way:.3%} on the requests' way, {beside:.2%} beside it")


if __name__ == "__main__":
    main()
