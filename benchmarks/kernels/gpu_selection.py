# SPDX-License-Identifier: Apache-2.0
"""Time selection and layout on a GPU, beside dense attention and beside the attention that follows.

Each choice is first compared with the CPU's at 4,096 tokens; a wrong choice gives no figures.

python benchmarks/kernels/gpu_selection.py [--lengths 8192,32768,131072] [--only NAME ...] [--block-size 128]
    [--json FILE]
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import dynaxx as dx
from dynaxx.lab.machine import need_gpu

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PATTERN = dx.SlidingWindow(1024) | dx.Sink(128)
RULES = [
    dx.TopK(0.1),
    dx.TopK(0.1, per="head"),
    dx.TopP(0.9),
    dx.Threshold(0.1),
    dx.TopK(0.1, dx.MeanPool()),
    dx.TopK(0.1, dx.MinMax()),
    dx.TopK(0.1, dx.MinMax(0.75, pool=16)),
    dx.TopK(0.1, dx.MeanPool(16)),
    dx.TopK(0.1, dx.AntiDiagonal()),
]
LONG = [dx.TopK(256)]


def inputs(seqlen):
    draw = lambda heads: torch.randn(1, seqlen, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return draw(Q_HEADS), draw(KV_HEADS), draw(KV_HEADS)


def check(rule, block_size):
    """Share of rows whose blocks differ from the CPU's choice for the same numbers."""
    q, k, _ = (x.float() for x in inputs(4096))
    ours = dx.select_blocks(q, k, rule, block_size=block_size)
    theirs = dx.select_blocks(q.cpu(), k.cpu(), rule, block_size=block_size)
    rows = lambda layout: torch.zeros(Q_HEADS * layout.q_blocks, layout.kv_blocks).index_put_(
        tuple(x.cpu() for x in layout.entries()[:2]), torch.ones(())
    )
    differing = (rows(ours.validate()) != rows(theirs)).any(-1).float().mean().item()
    assert differing < 0.01, f"{rule}: {differing:.1%} of the rows differ from the CPU's choice"


def median(run):
    return do_bench(run, warmup=10, rep=60, return_mode="median")


def dense_ms(q, k, v):
    views = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attend = torch.nn.functional.scaled_dot_product_attention
        return median(lambda: attend(*views, is_causal=True, enable_gqa=True))


def peak_of(run):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_rule(rule, block_size, q, k, v, dense):
    select = lambda: dx.select_blocks(q, k, rule, block_size=block_size)
    layout = select()
    select_ms = median(select)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select()
    return {
        "density": round(layout.density(), 4),
        "select_ms": round(select_ms, 4),
        "graph_ms": round(median(graph.replay), 4),
        "attend_ms": round(median(lambda: dx.sparse_attention(q, k, v, layout)), 4),
        "dense_ms": round(dense, 4),
        "share_of_dense": round(select_ms / dense, 4),
        "select_MiB": round(peak_of(select), 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--only", nargs="*", default=[""], help="rules whose name contains one of these")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--million", action="store_true", help="also one layer at 1,048,576 tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpu()
    wanted = lambda rules: [rule for rule in rules if any(part in repr(rule) for part in args.only)]
    for rule in wanted(RULES):
        check(PATTERN | rule, args.block_size)
    rows = []
    for seqlen in map(int, args.lengths.split(",")):
        q, k, v = inputs(seqlen)
        dense = dense_ms(q, k, v)
        for rule in wanted(RULES):
            rows.append(
                {"seqlen": seqlen, "rule": repr(rule), **time_rule(PATTERN | rule, args.block_size, q, k, v, dense)}
            )
            print(rows[-1], flush=True)
    if args.million:
        for row in million(wanted(LONG), args.block_size):
            rows.append(row)
            print(row, flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {Q_HEADS} q / {KV_HEADS} kv heads, "
          f"head_dim {HEAD_DIM}, bf16, blocks of {args.block_size}, beside {PATTERN}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def million(selectors, block_size, seqlen=1 << 20):
    """Time one layer's attention over 1M tokens, beside dense attention extrapolated by its quadratic growth."""
    torch.cuda.empty_cache()
    q, k, v = inputs(seqlen)
    dense = dense_ms(*[x[:, : seqlen // 8].contiguous() for x in (q, k, v)]) * 64
    for selector in selectors:
        select = lambda: dx.select_blocks(q, k, PATTERN | selector, block_size=block_size)  # noqa: B023
        run = lambda: dx.sparse_attention(q, k, v, select())  # noqa: B023
        peak = peak_of(run)
        yield {
            "seqlen": seqlen,
            "rule": repr(selector),
            "density": round(select().density(), 5),
            "select_ms": round(middle_of_three(select), 2),
            "select_and_attend_ms": round(middle_of_three(run), 2),
            "dense_ms_extrapolated": round(dense, 1),
            "peak_MiB_beside_inputs": round(peak),
        }


def middle_of_three(run):
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[1]


if __name__ == "__main__":
    main()
