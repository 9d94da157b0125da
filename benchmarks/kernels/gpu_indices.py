# SPDX-License-Identifier: Apache-2.0
"""Time a step with new block indices on a GPU: layout, columns, forward and backward, beside layouts sorted by torch.

    python benchmarks/kernels/gpu_indices.py --json gpu_indices.json

Results are checked first: layouts equal those of torch, and gradients those over them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import dynaxx as dx
from dynaxx.lab.machine import need_gpu
from dynaxx.layout import BlockGrid, BlockLayout
from dynaxx.layout.entries import entries_of_block_indices, sorted_entries
from dynaxx.layout.transpose import transpose


class Work(NamedTuple):
    name: str
    tokens: int
    heads: int
    block: int
    slots: int
    causal: bool


WORKS = (
    Work("8k, 12 heads, 20 % of blocks of 128", 8192, 12, 128, 13, False),
    Work("32k, 12 heads, 10 % of blocks of 128", 32768, 12, 128, 26, False),
    Work("32k, 12 heads, 10 % of blocks of 64", 32768, 12, 64, 51, False),
    Work("32k, 32 heads, 10 % of blocks of 128, causal", 32768, 32, 128, 26, True),
    Work("109,632 tokens, 7 heads, 64 of 1,713 blocks of 64", 109632, 7, 64, 64, False),
)


def sorted_by_torch(indices, work):
    grid = BlockGrid(work.tokens, work.tokens, (work.block, work.block), work.causal)
    layout = BlockLayout(
        work.tokens, work.tokens, grid.block_size, *sorted_entries(grid, entries_of_block_indices(indices, grid))
    )
    layout.derived.transposed = transpose(layout)
    return layout


def by_kernels(indices, work):
    layout = BlockLayout.from_block_indices(indices, work.tokens, block_size=work.block, causal=work.causal)
    return layout.with_transposed()


def milliseconds(call, repeats=15):
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def rows_of(work):
    blocks = -(-work.tokens // work.block)
    indices = (
        torch.rand(1, work.heads, blocks, blocks, device="cuda", dtype=torch.float32)
        .argsort(-1)[..., : work.slots]
        .int()
    )
    q, k, v = (
        torch.randn(1, work.tokens, work.heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    do = torch.randn_like(q)

    def step(layout_of, backward=True):
        out = dx.sparse_attention(q, k, v, layout_of(indices, work))
        return torch.autograd.grad(out, (q, k, v), do) if backward else out

    mine, theirs = by_kernels(indices, work), sorted_by_torch(indices, work)
    pairs = zip(
        (*mine.tensors[:4], *mine.transposed.tensors), (*theirs.tensors[:4], *theirs.transposed.tensors), strict=True
    )
    for found, wanted in pairs:
        assert torch.equal(found[: wanted.numel()] if found.ndim == 1 else found, wanted)
    assert torch.equal(step(by_kernels, False), step(sorted_by_torch, False))
    row = {"work": work.name}
    for name, layout_of in (("kernels", by_kernels), ("torch", sorted_by_torch)):
        for _ in range(3):
            step(layout_of)
        row[f"{name}: layout and columns"] = milliseconds(partial(layout_of, indices, work))
        row[f"{name}: step"] = milliseconds(partial(step, layout_of))
    kept = by_kernels(indices, work)
    row["kernels: layout"] = milliseconds(
        lambda: BlockLayout.from_block_indices(indices, work.tokens, block_size=work.block, causal=work.causal)
    )
    row["attention alone"] = milliseconds(lambda: step(lambda *_: kept))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpu()
    rows = []
    for work in WORKS:
        rows.append(rows_of(work))
        print(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True
        )
    if args.json:
        args.json.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
