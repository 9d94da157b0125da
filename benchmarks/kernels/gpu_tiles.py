# SPDX-License-Identifier: Apache-2.0
"""Time tile sizes of a backend's kernels on one workload, to choose its `config.py` from.

    python benchmarks/kernels/gpu_tiles.py --density 0.1
    python benchmarks/kernels/gpu_tiles.py --choice pieces --heads 64,4 --seqlen 16384 --density 0.15

With `--choice`: the Hopper kernels by what they choose from a problem: `pieces` of a group of heads in the backward,
`passes` of the backward, or `lines` of rows that alternate in the forward.
"""

import argparse
import importlib
import itertools
import os
import sys
from functools import partial
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.suites.gpu_workloads import Workload

from dynaxx.kernels.attention.triton import config
from dynaxx.lab.machine import need_gpu

CANDIDATES = {
    "forward": [
        (128, 64, 8, 2, 128), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3, 128), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 64, 4, 2, 128), (64, 128, 4, 2), (128, 128, 4, 2, 255), (128, 64, 4, 2, 168),
    ],
    "dq": [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 1), (128, 128, 8, 1), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 32, 4, 3), (64, 32, 4, 2, 168), (128, 32, 8, 2, 128), (64, 128, 4, 2),
    ],
    "dkv": [
        (64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 8, 1), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 1),
        (32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 2), (32, 128, 8, 3), (128, 64, 8, 1),
    ],
}  # fmt: skip


def time_choice(work, choice):
    """Print milliseconds of the Hopper forward or backward for each value of a choice, and for the chosen one."""
    from dynaxx.kernels.attention.hopper import backward, backward_dkv, forward

    device, group_size = torch.device("cuda", 0), work.heads[0] // work.heads[1]
    q, k, v = (x.detach() for x in work.inputs(device, 0))
    layout, scale = work.layout(device, 0), work.head_dim**-0.5
    out, lse = forward.attention_forward(q, k, v, layout, scale)
    attend = partial(forward.attention_forward, q, k, v, layout, scale)
    gradients = partial(backward.attention_backward, torch.randn_like(out), None, q, k, v, out, lse, layout, scale)
    lines = [count for count in (1, 2, 4, 8, 16, 32) if work.heads[0] % count == 0]
    pieces = sorted({1, 2, -(-group_size // 4), -(-group_size // 2), group_size})
    module, name, values, run = {
        "pieces": (backward_dkv, "backward_pieces", pieces, gradients),
        "passes": (backward, "backward_in_one_pass", [True, False], gradients),
        "lines": (forward, "lines_together", lines, attend),
    }[choice]
    chosen = getattr(module, name)
    for value in ["chosen", *values, "chosen"]:
        setattr(module, name, chosen if value == "chosen" else lambda *_, value=value: value)
        print(f"{choice} {value}: {do_bench(run, return_mode='median'):.3f} ms")
    setattr(module, name, chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", default="32,8", help="q heads and kv heads")
    parser.add_argument("--choice", choices=("pieces", "passes", "lines"), help="time it in the Hopper kernels instead")
    parser.add_argument("--backend", choices=("triton", "hopper"), default="triton")
    args = parser.parse_args()
    need_gpu()
    if args.choice:
        os.environ["DYNAXX_LAUNCH_LISTS"] = "0"  # else the first value's launches are repeated
    forward = importlib.import_module(f"dynaxx.kernels.attention.{args.backend}.forward")
    backward = importlib.import_module(f"dynaxx.kernels.attention.{args.backend}.backward")
    device = torch.device("cuda", 0)
    q_heads, kv_heads = map(int, args.heads.split(","))
    work = Workload(
        "tiles",
        args.seqlen,
        density=args.density,
        block_size=args.block,
        head_dim=args.head_dim,
        heads=(q_heads, kv_heads),
    )
    if args.choice:
        time_choice(work, args.choice)
        return
    layout = work.layout(device, 0)
    q, k, v = (x.detach() for x in work.inputs(device, 0))
    scale = args.head_dim**-0.5
    flops = work.flops(layout)
    out, lse = forward.attention_forward(q, k, v, layout, scale)
    do, dlse = torch.randn_like(out), torch.zeros_like(lse)
    runs = {
        "forward": lambda: forward.attention_forward(q, k, v, layout, scale),
        "dq": lambda: backward.attention_backward(do, dlse, q, k, v, out, lse, layout, scale),
        "dkv": lambda: backward.attention_backward(do, dlse, q, k, v, out, lse, layout, scale),
    }
    where = {
        "forward": (forward, "forward_tiles"),
        "dq": (backward, "backward_dq_tiles"),
        "dkv": (backward, "backward_dkv_tiles"),
    }
    print(f"seqlen {args.seqlen} density {layout.density():.3f} block {args.block} head_dim {args.head_dim}")
    if args.backend == "hopper":
        print(f"  forward: {do_bench(runs.pop('forward'), return_mode='median'):.3f} ms")  # its tiles are the blocks
    for kind in runs:
        module, name = where[kind]
        default = getattr(module, name)
        results = []
        for values in itertools.chain([None], CANDIDATES[kind]):
            tiles = values and config.TileSizes(*values)
            if tiles and (tiles.block_m > args.block or tiles.block_n > args.block):
                continue
            setattr(module, name, (lambda *_, tiles=tiles: tiles) if tiles else default)
            layout = work.layout(device, 0)  # what was launched for a layout is launched for it again
            try:
                ms = do_bench(runs[kind], warmup=10, rep=60, return_mode="median")
            except Exception as error:  # a tile too large for shared memory is an answer, not an end
                print(f"  {kind} {values}: {type(error).__name__}")
                continue
            results.append((ms, values))
        setattr(module, name, default)
        total = flops if kind == "forward" else 2.5 * flops
        for ms, values in sorted(results, key=lambda each: each[0]):
            print(f"  {kind} {values or 'default'}: {ms:.3f} ms, {total / ms / 1e9:.0f} TF/s", flush=True)


if __name__ == "__main__":
    main()
