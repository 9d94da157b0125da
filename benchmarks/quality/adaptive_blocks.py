# SPDX-License-Identifier: Apache-2.0
"""Compare layouts that mix 128-, 64- and 32-blocks with uniform ones, at equal recall.

    OMP_NUM_THREADS=1 python benchmarks/quality/adaptive_blocks.py --tokens 2048 --layers 4 12 20 28
    python benchmarks/quality/adaptive_blocks.py --tokens 8192 --layers 12 20 --device cuda

q and k are SmolLM2's own on pydoc text. A selection keeps a tile where its attention mass is worth its cost, from one
threshold per layer: tiles of one size, or a quadtree that takes a 128-tile whole, splits it into 64- and 32-tiles, or
drops it, whichever is worth most. A mixed selection is written as a layout of 32-blocks, whose neighbours the CPU
kernel's gather merges. Masses are the true ones (the best that any selector could do), or estimates by mean pooling.
Every selection is tuned to the same recall; then its visited pairs are counted and the kernel is timed: on a GPU in
bf16, as a CUDA graph, on as many copies of the sequence as fill it.
"""

import argparse
import statistics
import time

import torch

import dynaxx as dx
from dynaxx.lab.analyze.capture import visit_attention
from dynaxx.lab.models import load_model
from dynaxx.lab.texts import encode, pydoc_text
from dynaxx.layout import BlockGrid

SELECTIONS = {
    "uniform 128": (128,),
    "uniform 64": (64,),
    "uniform 32": (32,),
    "mixed 128/64/32": (32, 64, 128),
    "mixed 64/32": (32, 64),
}


def pooled(mass, factor):
    """Return (H, R, C) sums of factor x factor tiles."""
    return mass.unflatten(2, (-1, factor)).sum(3).unflatten(1, (-1, factor)).sum(2)


def spread(kept, factor):
    return kept.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def choose(mass, visible, sizes, worth, overhead):
    """Choose the 32-blocks to keep, (H, R, C) bool: the tree of tiles of `sizes` (ascending) with the most value.

    A tile's value is its mass minus `worth` times its cost: its visible pairs in 32-blocks, plus `overhead` per row of
    32 queries, since every row pays for fetching a range of keys.
    """
    best, kept, below = None, None, 1
    for size in sizes:
        factor = size // 32
        seen = pooled(visible, factor)
        value = pooled(mass, factor) - worth * (seen + overhead * factor * (seen > 0))
        here = torch.zeros_like(value) if best is None else pooled(best, factor // below)
        whole = value > here
        best = torch.where(whole, value, here)
        seen_here = spread(seen > 0, factor)
        taken = spread(whole, factor) & seen_here
        kept = taken if kept is None else taken | kept
        below = factor
    return kept & (visible > 0)


def tuned(mass, estimate, visible, sizes, overhead, recall, queries):
    """Return the cheapest choice that reaches the recall, by bisection on the threshold."""
    low, high = 1e-9, float(estimate.max())
    for _ in range(40):
        middle = (low * high) ** 0.5
        kept = choose(estimate, visible, sizes, middle, overhead)
        reached = float((mass * kept).sum()) / queries
        low, high = (middle, high) if reached >= recall else (low, middle)
    return choose(estimate, visible, sizes, low, overhead)


def as_layout(kept, seqlen, size):
    """Build a layout of `size`-blocks from the kept 32-blocks."""
    kept = kept[:, :: size // 32, :: size // 32] if size > 32 else kept
    most = int(kept.sum(-1).max())
    found = kept.byte().sort(dim=-1, descending=True, stable=True)
    indices = torch.where(found.values.bool(), found.indices, -1)[None, :, :, :most]
    return dx.BlockLayout.from_block_indices(indices.int(), seqlen, block_size=size)


def true_mass(q, k, scale):
    """Return (H, R, C) attention mass of every 32-block, head by head."""
    hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    rows = []
    for head in range(q.shape[1]):
        share = ((q[:, head] * scale) @ k[:, head].T).masked_fill_(hidden, -torch.inf).softmax(-1)
        rows.append(pooled(share[None], 32)[0])
    return torch.stack(rows)


def estimated_mass(q, k, scale):
    """Return the estimate of `MeanPool(16)` for every 32-block."""
    grid = BlockGrid(len(q), len(k), (32, 32))
    rows = dx.MeanPool(16).prepare(q[None], k[None], grid, scale)
    return rows(0, grid.q_blocks)[0].softmax(-1).nan_to_num(0.0) * 32


def milliseconds(calls, repeats, device):
    """Return the median of each call, in turns: a neighbour on the machine slows all of them."""
    if device == "cuda":
        from triton.testing import do_bench_cudagraph

        return [do_bench_cudagraph(call, return_mode="median") for call in calls]
    times = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn:  # the first is warm-up
                own.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(own) for own in times]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 20, 28])
    parser.add_argument("--recall", type=float, default=0.9)
    parser.add_argument("--overhead", type=float, nargs="+", default=[0.25, 1.0], help="cost of a range, in 32-blocks")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the kernel runs")
    parser.add_argument("--copies", type=int, default=4, help="of the sequence, on a GPU")
    options = parser.parse_args()
    model, tokenizer = load_model("smollm2", device=options.device)
    group_size = model.config.num_attention_heads // model.config.num_key_value_heads
    ids = encode(tokenizer, pydoc_text(), options.tokens)
    n = options.tokens
    pairs = pooled(torch.ones(1, n, n, device=options.device).tril_(), 32) / 32**2
    dtype, copies = (torch.bfloat16, options.copies) if options.device == "cuda" else (torch.float32, 1)
    totals = {}

    def measure(layer):
        if layer.layer not in options.layers:
            return
        q, k = (x.to(options.device).float().contiguous() for x in (layer.q, layer.k))
        mass = true_mass(q, k, layer.scale)
        visible = pairs.expand_as(mass)
        own_q, own_k = (x[None].to(dtype).expand(copies, -1, -1, -1).contiguous() for x in (q, k[:, ::group_size]))
        v = torch.randn(own_k.shape, generator=torch.Generator().manual_seed(0)).to(own_k)
        rows, shares, calls = [], [], []
        for source, estimate in (("true", mass), ("mean pool", estimated_mass(q, k, layer.scale))):
            for name, sizes in SELECTIONS.items():
                for overhead in options.overhead if len(sizes) > 1 else [0.0]:
                    kept = tuned(mass, estimate, visible, sizes, overhead, options.recall, n * q.shape[1])
                    layout = as_layout(kept, n, sizes[0])
                    rows.append((source, f"{name}, overhead {overhead}" if len(sizes) > 1 else name))
                    shares.append(float((visible * kept).sum() / visible.sum()))
                    calls.append(lambda layout=layout: dx.sparse_attention(own_q, own_k, v, layout, scale=layer.scale))
        for row, share, took in zip(rows, shares, milliseconds(calls, options.repeats, options.device), strict=True):
            totals.setdefault(row, []).append((share, took))
            print(f"layer {layer.layer:2} {row[0]:9} {row[1]:30} pairs {share:6.1%}  {took:7.2f} ms", flush=True)

    visit_attention(model, ids, measure)
    where = f"{torch.get_num_threads()} thread(s)" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"\nmean over layers {options.layers}, recall {options.recall}, {n} tokens, {where}")
    for (source, row), found in totals.items():
        share, took = (statistics.mean(each) for each in zip(*found, strict=True))
        print(f"{source:9} {row:30} pairs {share:6.1%}  {took:7.2f} ms")


if __name__ == "__main__":
    main()
