# SPDX-License-Identifier: Apache-2.0
"""Time the linear layers of a model on one thread: torch's own choice beside oneDNN, in fp32 and bf16.

    python benchmarks/kernels/cpu_linears.py --json

Shapes are those of SmolLM2-135M: hidden size 576, MLP 1,536. Times are the thread's CPU time, the lowest
of several rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from dynaxx.integrations.onednn.linears import _product

SHAPES = ((576, 192), (576, 576), (576, 1536), (1536, 576))
TOKENS = (16, 128, 512, 2048)


def best(run: Callable[[], Any], rounds: int = 7) -> float:
    run()
    seconds = []
    for _ in range(rounds):
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return min(seconds)


@torch.inference_mode()
def rows() -> list[dict[str, Any]]:
    found = []
    for tokens in TOKENS:
        for features_in, features_out in SHAPES:
            x, weight = torch.randn(tokens, features_in), torch.randn(features_out, features_in)
            half, half_weight = x.bfloat16(), weight.bfloat16()
            gflop = 2e-9 * tokens * features_in * features_out
            times = {
                "torch fp32, GF": best(lambda x=x, w=weight: linear(x, w)),
                "oneDNN fp32, GF": best(lambda x=x, w=weight: _product(x, w, None)),
                "torch bf16, GF": best(lambda x=half, w=half_weight: linear(x, w)),
            }
            row = {"tokens x features": f"{tokens:,} x {features_in:,} to {features_out:,}"}
            row |= {name: round(gflop / seconds) for name, seconds in times.items()}
            row["oneDNN, times faster"] = round(times["torch fp32, GF"] / times["oneDNN fp32, GF"], 2)
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = rows()
    if args.json:
        print(json.dumps({"rows": found}))
        return
    for row in found:
        print(row)


if __name__ == "__main__":
    main()
