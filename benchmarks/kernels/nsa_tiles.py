# SPDX-License-Identifier: Apache-2.0
"""Time the tile sizes of Native Sparse Attention's kernels with torch's profiler.

python benchmarks/kernels/nsa_tiles.py               # about 90 s on an H200; 32k tokens, bf16, head_dim 128
"""

import argparse
from collections import defaultdict

import torch
from nsa import DIM, HEADS, SIZES, block_indices, inputs_of, parts_of
from torch.profiler import ProfilerActivity, profile

from dynaxx.lab.machine import need_gpu
from dynaxx.trained.nsa.kernels.gpu import config as nsa_config
from dynaxx.trained.nsa.kernels.gpu.config import KeyTiles, QueryTiles
from dynaxx.trained.nsa.kernels.triton import operators as nsa
from dynaxx.trained.selected import selected_attention

QUERY = ((4, 4, 3), (4, 4, 2), (4, 8, 2), (8, 8, 2), (2, 4, 3), (8, 8, 3), (4, 4, 4))  # 16-row positions, warps, stages
FORWARD = ((64, 4, 2), (128, 8, 2), (64, 4, 1), (64, 4, 3), (128, 8, 1), (128, 4, 2), (64, 8, 2))  # rows, warps, stages
BACKWARD = (
    (32, 64, 4, 3),
    (64, 64, 4, 2),
    (64, 64, 8, 2),
    (128, 64, 8, 2),
    (32, 32, 4, 3),
    (64, 32, 4, 2),
    (64, 64, 8, 1),
)
SCORES = ((64, 8, 2), (64, 4, 2), (128, 8, 2), (64, 8, 3), (64, 4, 3), (128, 8, 3), (32, 4, 3))


def kernel_times(run, repeats=3):
    """Return milliseconds of each kernel per run."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times = defaultdict(float)
    for event in found.key_averages():
        times[event.key if event.key.startswith("_") else "torch"] += event.self_device_time_total / repeats / 1e3
    return {name: round(ms, 2) for name, ms in sorted(times.items(), key=lambda pair: -pair[1]) if ms > 0.02}


def use(index):
    """Take one choice of each list."""
    many, warps, stages = QUERY[index]
    rows, forward_warps, forward_stages = FORWARD[index]
    back_rows, back_n, back_warps, back_stages = BACKWARD[index]

    def query_tiles(group_size, slots, *_):
        group = nsa_config.group_rows(group_size)
        positions = max(1, min(16, many * 16 // group, 512 // slots))
        return QueryTiles(positions, group, max(16, positions * group), 64, warps, stages)

    nsa_config.query_tiles = query_tiles
    nsa_config.forward_key_tiles = lambda group_size, *_: KeyTiles(
        nsa_config.group_rows(group_size), rows, 64, forward_warps, forward_stages
    )
    nsa_config.backward_key_tiles = lambda group_size, *_: KeyTiles(
        nsa_config.group_rows(group_size), back_rows, back_n, back_warps, back_stages
    )
    nsa_config.score_tiles = lambda *_: SCORES[index]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", type=int, default=len(QUERY), help="as many of each list")
    args = parser.parse_args()
    need_gpu()
    leaves = inputs_of(64, 4, 32768, 0.999)
    parts = parts_of(leaves)
    for index in range(args.choices):
        use(index)
        print(f"choice {index}: query {QUERY[index]}, forward {FORWARD[index]}, backward {BACKWARD[index]}")
        select = lambda: nsa.select_blocks(
            parts["packed"].q, parts["k_cmp"], parts["lse"], parts["spans"], 4, DIM**-0.5
        )
        try:
            print(f"  select {SCORES[index]}:", kernel_times(select), flush=True)
        except Exception as error:  # a choice that needs more shared memory than there is
            print("  select:", str(error).splitlines()[0][:100])
        for name, (q_heads, kv_heads) in HEADS.items():
            indices = block_indices(32768, kv_heads, 0.75, SIZES.slc_count)[None]
            draw = lambda heads: torch.randn(
                1, 32768, heads, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            q, k, v = draw(q_heads), draw(kv_heads), draw(kv_heads)
            for schedule in ("union", "gather"):
                nsa_config.choose_schedule = lambda group_size: schedule  # noqa: B023
                attend = lambda: selected_attention(q, k, v, indices, backend="triton")  # noqa: B023
                run = lambda: torch.autograd.grad(attend().sum(), (q, k, v))  # noqa: B023
                try:
                    print(f"  {name} {schedule}:", kernel_times(run), flush=True)
                except Exception as error:
                    print(f"  {name} {schedule}:", str(error).splitlines()[0][:100], flush=True)


if __name__ == "__main__":
    main()
