# SPDX-License-Identifier: Apache-2.0
"""Time tile sizes of a backend's kernels on one workload, to choose its `config.py` from.

    python benchmarks/kernels/gpu_tiles.py --density 0.1
    python benchmarks/kernels/gpu_tiles.py --pieces --heads 64,4 --seqlen 16384 --density 0.15

With `--pieces`: the backward of the Hopper kernels by the number of pieces that a group of heads is divided into.
"""

import argparse
import importlib
import itertools
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


def time_pieces(work, group_size):
    """Print milliseconds of the Hopper backward in one pass, by the number of pieces of a group."""
    from dynaxx.kernels.attention.hopper import backward_dkv
    from dynaxx.kernels.attention.hopper.backward import attention_backward
    from dynaxx.kernels.attention.hopper.forward import attention_forward

    device, chosen = torch.device("cuda", 0), backward_dkv.backward_pieces
    q, k, v = (x.detach() for x in work.inputs(device, 0))
    scale = work.head_dim**-0.5
    out, lse = attention_forward(q, k, v, work.layout(device, 0), scale)
    do = torch.randn_like(out)
    for pieces in ["chosen", *sorted({1, 2, -(-group_size // 4), -(-group_size // 2), group_size}), "chosen"]:
        backward_dkv.backward_pieces = chosen if pieces == "chosen" else lambda *_, pieces=pieces: pieces
        layout = work.layout(device, 0)  # what was launched for a layout is launched for it again
        backward = partial(attention_backward, do, None, q, k, v, out, lse, layout, scale)
        print(f"pieces {pieces}: {do_bench(backward, return_mode='median'):.3f} ms")
    backward_dkv.backward_pieces = chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", default="32,8", help="q heads and kv heads")
    parser.add_argument("--pieces", action="store_true", help="time pieces of groups in the Hopper backward instead")
    parser.add_argument("--backend", choices=("triton", "hopper"), default="triton")
    args = parser.parse_args()
    need_gpu()
    forward = importlib.import_module(f"dynaxx.kernels.{args.backend}.attention.forward")
    backward = importlib.import_module(f"dynaxx.kernels.{args.backend}.attention.backward")
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
    if args.pieces:
        time_pieces(work, q_heads // kv_heads)
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
