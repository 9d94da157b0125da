# SPDX-License-Identifier: Apache-2.0
"""Time a step with new block indices on a GPU: layout, columns, forward and backward, beside cuDNN's if it is there.

    python benchmarks/kernels/gpu_indices.py --json gpu_indices.json [--profile FILE]

Results are checked first: layouts equal those of torch, and outputs those over them. `wall` is the time of a call that
finds an idle GPU, the host's time included; `host` the time until a call returns; `device` the time of the kernels
alone, captured into a CUDA graph. cuDNN's block-sparse attention (`nvidia-cudnn-frontend`) is not causal, and needs
equal heads of 128.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dynaxx as dx
from dynaxx.lab.machine import need_gpu
from dynaxx.layout import BlockGrid, BlockLayout
from dynaxx.layout.entries import entries_of_block_indices, sorted_entries
from dynaxx.layout.layout_tensors import transpose

CALLS, IN_GRAPH = 25, 20


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


def sorted_by_torch(indices: Tensor, work: Work) -> BlockLayout:
    grid = BlockGrid(work.tokens, work.tokens, (work.block, work.block), work.causal)
    entries = sorted_entries(grid, entries_of_block_indices(indices, grid))
    layout = BlockLayout(work.tokens, work.tokens, grid.block_size, *entries)
    layout.derived.transposed = transpose(layout)
    return layout


def by_kernels(indices: Tensor, work: Work) -> BlockLayout:
    return BlockLayout.from_block_indices(indices, work.tokens, block_size=work.block, causal=work.causal)


def wall(call: Callable[[], object], calls: int = CALLS) -> list[float]:
    """Return the median and the largest milliseconds of calls that each find an idle GPU."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(times), max(times)]


def host(call: Callable[[], object], calls: int = 200) -> float:
    """Return the milliseconds until a call returns."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    found = (time.perf_counter() - begin) / calls * 1e3
    torch.cuda.synchronize()
    return found


def device(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call's kernels, which a CUDA graph launches."""
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            kept.append(call())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        start.record()
        graph.replay()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / IN_GRAPH


def cudnn_step(q: Tensor, k: Tensor, v: Tensor, do: Tensor, indices: Tensor, block: int) -> Callable[[], Any]:
    """Return a step of cuDNN's block-sparse attention over the same blocks. Its tensors are (B, H, N, D)."""
    from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

    q, k, v, do = (x.detach().transpose(1, 2).contiguous() for x in (q, k, v, do))

    def step() -> Any:
        out, lse = block_sparse_attention_forward(q, k, v, indices, sparse_block_size=block)
        return out, block_sparse_attention_backward(do, q, k, v, out, lse, indices, sparse_block_size=block)

    return step


def row_of(work: Work, profile: Path | None) -> dict[str, Any]:
    blocks = -(-work.tokens // work.block)
    draw = torch.rand(1, work.heads, blocks, blocks, device="cuda", dtype=torch.float32)
    indices = draw.argsort(-1)[..., : work.slots].int().contiguous()
    q, k, v = (
        torch.randn(1, work.tokens, work.heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    do = torch.randn_like(q)

    def step(layout_of: Callable[[], BlockLayout]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(dx.sparse_attention(q, k, v, layout_of()), (q, k, v), do)

    layout_of = partial(by_kernels, indices, work)
    mine, theirs = layout_of().with_transposed(), sorted_by_torch(indices, work)
    mine_tensors = (*mine.tensors[:4], *mine.transposed.tensors)
    for found, wanted in zip(mine_tensors, (*theirs.tensors[:4], *theirs.transposed.tensors), strict=True):
        assert torch.equal(found[: wanted.numel()] if found.ndim == 1 else found, wanted)
    assert torch.equal(dx.sparse_attention(q, k, v, mine), dx.sparse_attention(q, k, v, theirs))
    both = lambda: layout_of().with_transposed()
    steps = {"step": partial(step, layout_of), "step over a kept layout": partial(step, lambda: mine)}
    for call in (layout_of, both, *steps.values()):
        for _ in range(4):
            call()
    row: dict[str, Any] = {"work": work.name}
    for name, call in (("layout", layout_of), ("layout and columns", both)):
        row |= {f"{name}: wall": wall(call), f"{name}: host": host(call), f"{name}: device": device(call)}
    for name, call in steps.items():
        row |= {f"{name}: wall": wall(call), f"{name}: host": host(call, 40)}
        with torch.autograd.set_multithreading_enabled(False):  # autograd's own thread takes turns with the caller
            row |= {f"{name}: wall, one thread": wall(call), f"{name}: host, one thread": host(call, 40)}
    try:
        theirs_step = cudnn_step(q, k, v, do, indices, work.block) if not work.causal else None
        if theirs_step is not None:
            for _ in range(4):
                out, _ = theirs_step()
            assert (out.transpose(1, 2) - dx.sparse_attention(q, k, v, mine)).abs().max() < 0.02
            row |= {"cuDNN's step: wall": wall(theirs_step), "cuDNN's step: host": host(theirs_step, 40)}
    except Exception as error:  # not installed, or it refuses: said in the row
        row["cuDNN"] = f"{type(error).__name__}: {error}"[:300]
    if profile is not None:
        run = cProfile.Profile()
        for name, call, count in (("both", both, 300), ("step", steps["step"], 100)):
            with torch.autograd.set_multithreading_enabled(False):  # a profile sees the calling thread alone
                run.enable()
                for _ in range(count):
                    call()
                run.disable()
            with profile.open("a") as file:
                print(work.name, name, count, file=file)
                pstats.Stats(run, stream=file).sort_stats("tottime").print_stats(45)
            run.clear()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="file for profiles of the host, of the first work")
    args = parser.parse_args()
    need_gpu()
    rows = []
    for i, work in enumerate(WORKS):
        rows.append(row_of(work, None if i else args.profile))
        for key, value in rows[-1].items():
            shown = [round(x, 4) for x in value] if isinstance(value, list) else value
            print(f"{key:36}", round(shown, 4) if isinstance(shown, float) else shown, flush=True)
    if args.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
