# SPDX-License-Identifier: Apache-2.0
"""Time a decoding step of native sparse attention on a GPU beside dense attention over the same cache.

    python benchmarks/kernels/nsa_decode.py            # about a minute

bf16, head_dim 128, the paper's sizes, pages of 64 tokens in disorder. A step compresses what the last token completed
(mean), attends to compressed tokens, chooses blocks, attends to them and to the window, and mixes. "kept" takes over
the blocks of an earlier step; "host" is a step that nothing waits for, launched kernel by kernel. Dense: SDPA over
contiguous keys of one length, with each of its kernels that serve, and `sparse_decode` over all pages. Everything else
as a CUDA graph; medians of `do_bench` in microseconds, which empties the L2 cache before each. First each step is
compared with fp64 over the blocks that it chose.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import dynaxx as dx
from dynaxx.lab.machine import need_gpu

DIM, PAGE, SIZES = 128, 64, dx.trained.NsaSizes()
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def captured(run):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def time_of(run):
    return round(1000 * do_bench(run, warmup=5, rep=25, return_mode="median"), 1)


def host_time_of(run, count=60):
    """Return the microseconds until a call returns: the median of five averages over `count` calls."""
    found = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            run()
        found.append((time.perf_counter() - begin) / count * 1e6)
    return round(statistics.median(found[1:]), 1)


def check(q, cache, gates):
    """Stop unless the first sequence's step agrees with fp64 over its blocks."""
    q, gates = q[:1], gates[:1]
    cache = replace(cache, seqused_k=cache.seqused_k[:1], page_table=cache.page_table[:1])
    out, blocks = dx.trained.nsa_decode(q, cache, gates)
    kept = cache.compressed
    wide = replace(
        cache, k=cache.k.double(), v=cache.v.double(),
        compressed=replace(kept, k=kept.k.double(), v=kept.v.double()),
    )  # fmt: skip
    want = dx.trained.nsa_decode(q.double(), wide, gates.double(), block_indices=blocks, backend="reference").out
    error = float((out - want).abs().max())
    if error > 2e-2 * float(want.abs().max()):
        sys.exit(f"differs from fp64 by {error}, so nothing is timed")


def row_of(q_heads, kv_heads, batch, seqlen):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    pages = seqlen // PAGE
    k, v = (draw(batch * pages, PAGE, kv_heads, DIM) for _ in range(2))
    q, gates = draw(batch, 1, q_heads, DIM), torch.rand(batch, 1, q_heads, 3, device="cuda", dtype=torch.bfloat16)
    used = torch.full((batch,), seqlen, dtype=torch.int32, device="cuda")
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    cache = dx.trained.compress_pages(dx.PagedCache(k, v, used, table), SIZES)
    check(q, cache, gates)
    blocks = dx.trained.nsa_decode(q, cache, gates).block_indices

    def step(**given):
        dx.trained.compress_pages(cache, new_tokens=1)
        return dx.trained.nsa_decode(q, cache, gates, **given)

    row = {"heads": f"{q_heads}/{kv_heads}", "batch": batch, "tokens": seqlen, "step_us": time_of(captured(step))}
    row["kept_us"] = time_of(captured(lambda: step(block_indices=blocks)))
    row["host_us"] = host_time_of(step)
    row["all_pages_us"] = time_of(captured(lambda: dx.sparse_decode(q, cache)))
    dense_k, dense_v = (x.view(batch, seqlen, kv_heads, DIM).transpose(1, 2) for x in (k, v))
    dense = lambda: torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), dense_k, dense_v, enable_gqa=True
    )
    for name, kernel in KERNELS.items():
        with sdpa_kernel(kernel):
            try:
                dense()
            except RuntimeError:
                continue
            row[f"sdpa_{name}_us"] = time_of(captured(dense))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--rows", type=int, default=6, help="only the first so many")
    args = parser.parse_args()
    need_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    rows = []
    every = product(((64, 4), (32, 8)), ((1, 32768), (1, 131072), (16, 32768)))
    for heads, sequences in islice(every, args.rows):
        rows.append(row_of(*heads, *sequences))
        print(rows[-1], flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
