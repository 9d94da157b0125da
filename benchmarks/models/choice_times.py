# SPDX-License-Identifier: Apache-2.0
"""Time how one layer of SmolLM2's shape gets its blocks on a CPU: by scorer, and from another layer.

    python benchmarks/models/choice_times.py --tokens 8192 --json

CPU seconds of one thread, medians of passes in turns.
"""

import argparse
import json
import statistics
import time

import torch

import dynaxx as dx
from dynaxx.lab.tune.costs import rule_of
from dynaxx.layout import as_block_size

BUDGETS = (0.0, 0.06, 0.1, 0.15, 0.2, 0.1, 0.06, 0.3, 0.15)  # of nine heads
READ = (3, 3, 0, 1, 2, 5, 6, 7, 8)  # heads whose blocks another layer's heads read


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k = (torch.randn(1, args.tokens, heads, 64) for heads in (9, 3))

    def choose(scorer, block):
        rule = rule_of(scorer, BUDGETS, block, 64, args.tokens // as_block_size(block)[1] // 2)
        return lambda: dx.select_blocks(q, k, rule, block_size=block)

    chosen = choose(dx.MeanQuery(), 32)()
    ways = {
        "mean query, blocks of 32": choose(dx.MeanQuery(), 32),
        "mean queries of 16 tokens, blocks of 32": choose(dx.TileQueries(16), 32),
        "mean queries of 8 tokens, blocks of 32": choose(dx.TileQueries(8), 32),
        "mean queries of 16 tokens, blocks of 32 x 16": choose(dx.TileQueries(16), (32, 16)),
        "mean queries of 8 tokens, blocks of 32 x 16": choose(dx.TileQueries(8), (32, 16)),
        "mean query, blocks of 16": choose(dx.MeanQuery(), 16),
        "read from another layer, blocks of 32": lambda: chosen.take_heads(READ),
    }
    found = {name: [] for name in ways}
    with torch.inference_mode():
        for _ in range(args.turns):
            for name, run in ways.items():
                started = time.thread_time()
                run()
                found[name].append(time.thread_time() - started)
    rows = [{"a layer's blocks": name, "ms": 1e3 * statistics.median(times)} for name, times in found.items()]
    print(json.dumps({"rows": rows}) if args.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
