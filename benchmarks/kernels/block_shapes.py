# SPDX-License-Identifier: Apache-2.0
"""Time the choice of blocks and attention over them for several block shapes on a CPU, in CPU ms of one thread.

python benchmarks/kernels/block_shapes.py --tokens 4096 --json
"""

import argparse
import json
import time

import torch

import dynaxx as dx
from dynaxx.lab.tune.costs import rule_of
from dynaxx.selection import select_blocks

SHAPES = ((32, 32), (16, 16), (32, 16), (64, 16), (64, 32), (64, 64))


def timed(run):
    began = time.thread_time()
    found = run()
    return 1e3 * (time.thread_time() - began), found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, nargs=2, default=(9, 3), help="of q and of kv")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make = lambda heads: torch.randn(1, args.tokens, heads, args.head_dim)
    q, k, v = make(args.heads[0]), make(args.heads[1]), make(args.heads[1])
    cases = [(shape, budget) for budget in args.budgets for shape in SHAPES]
    times = {case: ([], []) for case in cases}
    density = {}
    for _ in range(args.turns):
        for shape, budget in cases:
            rule = rule_of(dx.MeanQuery(), budget, shape, 64, args.tokens // shape[1] // 2)
            chosen, layout = timed(lambda: select_blocks(q, k, rule, block_size=shape))  # noqa: B023
            attended, _ = timed(lambda: dx.sparse_attention(q, k, v, layout))  # noqa: B023
            density[shape, budget] = layout.density()
            for into, found in zip(times[shape, budget], (chosen, attended), strict=True):
                into.append(found)
    rows = []
    for shape, budget in cases:
        chosen, attended = (min(each) for each in times[shape, budget])
        row = {"blocks": f"{shape[0]} x {shape[1]}", "budget": budget, "density": f"{density[shape, budget]:.1%}"}
        rows.append({**row, "choice": chosen, "attention": attended, "both": chosen + attended})
    print(json.dumps({"rows": rows}) if args.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
