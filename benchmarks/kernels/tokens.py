# SPDX-License-Identifier: Apache-2.0
r"""Time attention over tokens that each query chose beside dense SDPA, on the CPU: one layer, fp32.

    python benchmarks/kernels/tokens.py --keys 32768 --tokens 2048 --json
    python benchmarks/kernels/tokens.py --reads --rows 96 --shapes "GQA 4/1 of 128" "GQA 8/1 of 128" --json

The last queries of the sequence are timed, and dense attention over fewer tokens. The time of a whole layer is computed
from their rates, since a dense layer of 32k tokens takes a minute. Results are compared with fp64 first. Each number is
the median of interleaved runs on one thread, in its CPU time, which neighbours on the machine do not disturb.
`--reads` times the forward alone, over few keys and many, chosen and consecutive, beside a matrix product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx

# q heads, kv heads, head_dim of k and of v, and those of dense prefill: MLA expands to 192 and 128, and SDPA takes a
# tenth of the time where values are as wide as keys.
SHAPES = {
    "GQA 4/1 of 128": (4, 1, 128, 128, 128, 128),
    "GQA 8/1 of 128": (8, 1, 128, 128, 128, 128),
    "MLA 16 heads, 576/512": (16, 1, 576, 512, 192, 192),
    "MHA 1/1 of 128": (1, 1, 128, 128, 128, 128),
}


def choices(queries: int, keys: int, count: int, overlap: float, seed: int = 0) -> Tensor:
    """Draw (1, queries, 1, count) tokens; neighbours share `overlap` of theirs, and early queries see all they can."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((1, queries, 1, count), -1, dtype=torch.int32)
    mine = torch.zeros(0, dtype=torch.int64)
    for t in range(queries):
        seen = keys - queries + t + 1
        if seen <= count:
            rows[0, t, 0, :seen] = torch.arange(seen)
            continue
        kept = mine[torch.randperm(len(mine), generator=generator)[: int(count * overlap)]]
        taken = torch.zeros(seen, dtype=torch.bool)
        taken[kept] = True
        while (lacking := count - int(taken.sum())) > 0:
            taken[torch.randint(0, seen, (lacking,), generator=generator)] = True
        mine = taken.nonzero()[:, 0]
        rows[0, t, 0] = mine
    return rows


def seconds(run: Callable[[], Any]) -> float:
    """Return the CPU time of this thread for one call."""
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def medians(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return each one's median of interleaved calls, the first left out."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            found[name].append(seconds(run))
    return {name: statistics.median(each[1:]) for name, each in found.items()}


def check(shape: tuple[int, ...]) -> None:
    """Compare a small problem with fp64.

    Raises:
        SystemExit: an error above the bar.
    """
    q_heads, kv_heads, dim, dim_v, *_ = shape
    q, k = torch.randn(1, 40, q_heads, dim), torch.randn(1, 300, kv_heads, dim)
    v = k[..., :dim_v] if dim_v < dim else torch.randn(1, 300, kv_heads, dim_v)
    chosen = choices(40, 300, 64, 0.5)
    got = dx.trained.selected_attention(q, k, v, chosen, block_size=1, backend="cpu").double()
    want = dx.trained.selected_attention(q.double(), k.double(), v.double(), chosen, block_size=1, backend="reference")
    error = float((got - want).norm() / want.norm())
    if not error < 2e-6:
        raise SystemExit(f"wrong: relative error {error:.1e} against fp64")


def rates(shape: tuple[int, ...], rows: int, args: argparse.Namespace, overlap: float) -> dict[str, Any]:
    """Time one shape at one overlap: seconds of the whole layer, dense and sparse, forward and backward."""
    q_heads, kv_heads, dim, dim_v, dense_dim, dense_dim_v = shape
    q = torch.randn(1, rows, q_heads, dim, requires_grad=True)
    k = torch.randn(1, args.keys, kv_heads, dim, requires_grad=True)
    v = k[..., :dim_v] if dim_v < dim else torch.randn(1, args.keys, kv_heads, dim_v, requires_grad=True)
    chosen = choices(rows, args.keys, args.tokens, overlap)
    do = torch.randn(1, rows, q_heads, dim_v)
    dense = [
        torch.randn(1, q_heads, args.dense, width, requires_grad=True) for width in (dense_dim, dense_dim, dense_dim_v)
    ]
    dense_do = torch.randn(1, q_heads, args.dense, dense_dim_v)
    sparse_out = dx.trained.selected_attention(q, k, v, chosen, block_size=1)
    dense_out = scaled_dot_product_attention(*dense, is_causal=True)
    leaves = (q, k) if dim_v < dim else (q, k, v)

    def forward() -> None:
        with torch.no_grad():
            dx.trained.selected_attention(q, k, v, chosen, block_size=1)

    def dense_forward() -> None:
        with torch.no_grad():
            scaled_dot_product_attention(*dense, is_causal=True)

    runs: dict[str, Callable[[], Any]] = {"sparse": forward, "dense": dense_forward}
    if not args.forward_only:
        runs["sparse backward"] = lambda: torch.autograd.grad(sparse_out, leaves, do, retain_graph=True)
        runs["dense backward"] = lambda: torch.autograd.grad(dense_out, dense, dense_do, retain_graph=True)
    found = medians(runs, args.repeats)
    pairs = args.keys * (args.keys + 1) / 2
    scale = pairs / (args.dense * (args.dense + 1) / 2)  # of the dense layer, at the rate of a shorter one
    early = min(args.keys, args.tokens)  # queries that see less than they may choose
    share = (early * (early + 1) / 2 + (args.keys - early) * args.tokens) / int((chosen >= 0).sum())
    row = {"shape": "", "overlap": f"{overlap:.0%}"}
    for name, suffix in (("forward", ""), ("backward", " backward")):
        if f"sparse{suffix}" not in found:
            continue
        dense_s, sparse_s = found[f"dense{suffix}"] * scale, found[f"sparse{suffix}"] * share
        row |= {f"dense {name} s": dense_s, f"sparse {name} s": sparse_s, f"{name} speed-up": dense_s / sparse_s}
    flops = 2 * q_heads * (dim + dim_v) * int((chosen >= 0).sum())
    return row | {"sparse GF/s": flops / found["sparse"] / 1e9}


def reads(shape: tuple[int, ...], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the forward over keys that fit the caches and over all, chosen anywhere and one after the other."""
    q_heads, kv_heads, dim, dim_v, *_ = shape
    q, square = torch.randn(1, args.rows, q_heads, dim), torch.randn(2048, 2048)
    runs: dict[str, Callable[[], Any]] = {"product": lambda: square @ square}
    cases = {}
    for keys in (2 * args.tokens, args.keys):
        k, v = torch.randn(1, keys, kv_heads, dim), torch.randn(1, keys, kv_heads, dim_v)
        last = torch.arange(args.rows)[:, None] + torch.arange(keys - args.rows - args.tokens + 1, keys - args.rows + 1)
        for order, chosen in (
            ("anywhere, 75 % as before", choices(args.rows, keys, args.tokens, 0.75)),
            ("the last ones", last.int()[None, :, None]),
        ):
            cases[f"{keys} {order}"] = (keys, order, k.nbytes + v.nbytes)
            runs[f"{keys} {order}"] = lambda k=k, v=v, chosen=chosen: dx.trained.selected_attention(
                q, k, v, chosen, block_size=1
            )
    found = medians(runs, args.repeats)
    flops = 2 * q_heads * (dim + dim_v) * args.rows * args.tokens
    bytes_read = 4 * kv_heads * (dim + dim_v) * args.rows * args.tokens
    rows = [
        {"keys": keys, "keys and values MiB": size / 2**20, "tokens": order}
        | {"GF/s": flops / found[name] / 1e9, "read GB/s": bytes_read / found[name] / 1e9}
        for name, (keys, order, size) in cases.items()
    ]
    return [*rows, {"tokens": "a product of 2,048 x 2,048 matrices", "GF/s": 2 * 2048**3 / found["product"] / 1e9}]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=32768, help="tokens of the layer")
    parser.add_argument("--tokens", type=int, default=2048, help="that each query chooses")
    parser.add_argument("--rows", type=int, default=256, help="queries that are timed, the last ones")
    parser.add_argument("--dense", type=int, default=4096, help="tokens of the dense layer whose rate is taken")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--overlaps", nargs="+", type=float, default=[0.0, 0.75, 0.95])
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--reads", action="store_true", help="time what reading keys costs instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name in args.shapes:
        check(SHAPES[name])
        if args.reads:
            rows += [{"shape": name} | row for row in reads(SHAPES[name], args)]
            continue
        for overlap in args.overlaps:
            rows.append(rates(SHAPES[name], args.rows, args, overlap) | {"shape": name})
            if not args.json:
                print({key: round(x, 2) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
