# SPDX-License-Identifier: Apache-2.0
r"""Time attention over chosen tokens on a GPU, forward and backward, beside dense SDPA.

    python benchmarks/gpu_tokens.py --json gpu_tokens.json

Nobody has run it yet: the kernels were written and checked without a GPU. Each shape is compared with fp64 first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx

# name: q heads, kv heads, head_dim of k and of v, tokens per block, tokens chosen, keys, overlap, TF/s asked for
SHAPES = {
    "DSA 128 heads, 576/512": (128, 1, 576, 512, 1, 2048, 32768, 0.75, (480, 250)),
    "GQA 24/2 of 256, groups of 4": (24, 2, 256, 256, 4, 2048, 65536, 0.75, None),
    "GQA 32/8 of 128": (32, 8, 128, 128, 1, 2048, 65536, 0.75, None),
}


def choices(queries: int, keys: int, slots: int, size: int, overlap: float, device: str) -> Tensor:
    """Draw (1, queries, 1, slots) blocks; `overlap` of them are common to all queries, the others differ."""
    blocks = (keys - queries) // size  # those that every query sees
    common = torch.randperm(blocks, device=device)[: int(slots * overlap)]
    rest = torch.rand(queries, blocks, device=device).index_fill_(1, common, -1.0).topk(slots - len(common)).indices
    return torch.cat([common.expand(queries, -1), rest], 1).int()[None, :, None]


def milliseconds(run: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median time of a call on the GPU."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def check(shape: tuple[Any, ...]) -> None:
    """Compare a small problem of the shape with fp64.

    Raises:
        SystemExit: an error above what bf16 explains.
    """
    q_heads, kv_heads, dim, dim_v, size = shape[:5]
    make = lambda tokens, heads, width: torch.randn(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    q, k = make(16, q_heads, dim), make(256, kv_heads, dim)
    v = k[..., :dim_v] if dim_v < dim else make(256, kv_heads, dim_v)
    chosen = choices(16, 256, 64 // size, size, 0.5, "cuda")
    got = dx.selected_attention(q, k, v, chosen, block_size=size, backend="triton").double()
    want = dx.selected_attention(q.double(), k.double(), v.double(), chosen, block_size=size, backend="reference")
    error = float((got - want).norm() / want.norm())
    if not error < 1e-2:
        raise SystemExit(f"wrong: relative error {error:.1e} against fp64")


def measure(shape: tuple[Any, ...], queries: int) -> dict[str, Any]:
    """Time one shape: milliseconds and TF/s, forward and backward, and the same queries dense."""
    q_heads, kv_heads, dim, dim_v, size, tokens, keys, overlap, asked = shape
    make = lambda count, heads, width: torch.randn(
        1, count, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    q, k = make(queries, q_heads, dim), make(keys, kv_heads, dim)
    v = k[..., :dim_v] if dim_v < dim else make(keys, kv_heads, dim_v)
    chosen = choices(queries, keys, tokens // size, size, overlap, "cuda")
    run = lambda: dx.selected_attention(q, k, v, chosen, block_size=size, backend="triton")
    out = run()
    do = torch.randn_like(out)
    leaves = (q, k) if dim_v < dim else (q, k, v)
    forward = milliseconds(run)
    backward = milliseconds(lambda: torch.autograd.grad(out, leaves, do, retain_graph=True))
    flops = 2 * queries * q_heads * tokens * (dim + dim_v)
    row = {
        "forward ms": forward,
        "forward TF/s": flops / forward / 1e9,
        "backward ms": backward,
        "backward TF/s": 2.5 * flops / backward / 1e9,
        "asked TF/s": "" if asked is None else f"{asked[0]}, {asked[1]}",
    }
    if dim_v == dim:
        dense = [x.detach().transpose(1, 2) for x in (q, k, v)]
        attend = lambda: scaled_dot_product_attention(*dense, enable_gqa=True)
        row["dense forward ms"] = milliseconds(attend)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=4096, help="queries at the end of the sequence")
    parser.add_argument("--json", type=Path, help="write the rows here, for `record.py --from`")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    rows = []
    for name, shape in SHAPES.items():
        check(shape)
        rows.append({"shape": name} | measure(shape, args.queries))
        print({key: round(x, 2) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
