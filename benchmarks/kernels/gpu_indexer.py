# SPDX-License-Identifier: Apache-2.0
r"""Time the indexer and its top-k on a GPU beside dense attention of the same queries, and measure its memory.

    python benchmarks/kernels/gpu_indexer.py --json gpu_indexer.json

Each query of a sequence chooses 2,048 tokens. Dense attention is causal SDPA. Choices are compared with the definition
first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpu_tokens import milliseconds
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx

# indexer heads and width; dense q heads and head_dim beside it
SHAPES = {
    "4 heads of 64, beside 32 heads of 128": (4, 64, 32, 128),
    "64 heads of 128, beside 128 heads of 192 (MLA expanded)": (64, 128, 128, 192),
}
TOKENS = 2048


def draw(queries: int, keys: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw an indexer's q, k and weights."""
    normal = lambda *shape: torch.randn(*shape, device="cuda")
    return normal(1, queries, heads, dim), normal(1, keys, dim), normal(1, queries, heads).abs()


def check(heads: int, dim: int, precision: str) -> None:
    """Compare choices with those of the definition on the same rounded numbers.

    Raises:
        SystemExit: more than 1 of 1,000 choices differ, in fp8 more than 10.
    """
    inputs = draw(2200, 6000, heads, dim)
    got, want = (
        dx.trained.index_tokens(*inputs, dx.trained.TopKTokens(512), precision=precision, backend=backend)  # type: ignore[arg-type]
        for backend in ("auto", "reference")
    )
    same = float((got == want).float().mean())
    shared = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(got[0, ::50, 0], want[0, ::50, 0], strict=True))
    total = got[0, ::50, 0].numel()
    print(
        f"{heads} heads of {dim}, {precision}: {shared / total:.5f} of choices agree, {same:.4f} in place", flush=True
    )
    if shared < (0.99 if precision == "fp8" else 0.999) * total:  # tensor cores add fp8 products with 14 bits
        raise SystemExit("wrong choices")


def memory_of(queries: int, keys: int) -> dict[str, Any]:
    """Measure the peak of memory of the last queries of a long sequence: with inputs and choice, and without."""
    torch.cuda.empty_cache()
    inputs = tuple(x.bfloat16() for x in draw(queries, keys, 4, 64))
    own = sum(x.nbytes for x in inputs)
    run = lambda: dx.trained.index_tokens(*inputs, dx.trained.TopKTokens(TOKENS), precision="bf16")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    choice = run()
    peak = torch.cuda.max_memory_allocated() - before
    row = {"indexer": "4 heads of 64, bf16", "queries": queries, "keys": keys, "GiB in all": (own + peak) / 2**30}
    row |= {"GiB of the choice": choice.nbytes / 2**30, "GiB of lists": (peak - choice.nbytes) / 2**30}
    del choice
    row["ms"] = milliseconds({"x": run}, repeats=1)["x"]
    print(row, flush=True)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=131072)
    parser.add_argument("--long", type=int, default=1 << 20, help="keys of the measurement of memory")
    parser.add_argument("--shapes", type=int, default=2, help="how many of the shapes")
    parser.add_argument("--json", type=Path, help="write the rows here, for `record.py --from`")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name, (heads, dim, q_heads, head_dim) in list(SHAPES.items())[: args.shapes]:
        precisions = ("bf16", "int8", "fp32") if heads <= 8 else ("fp8", "bf16")
        runs = {}
        inputs = draw(args.keys, args.keys, heads, dim)
        for precision in precisions:
            check(heads, dim, precision)
            given = inputs if precision == "fp32" else tuple(x.bfloat16() for x in inputs)
            runs[precision] = lambda given=given, precision=precision: dx.trained.index_tokens(
                *given, dx.trained.TopKTokens(TOKENS), precision=precision
            )
        q = torch.randn(1, q_heads, args.keys, head_dim, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, q_heads, args.keys, head_dim, device="cuda", dtype=torch.bfloat16)
        runs["dense"] = lambda q=q, k=k: scaled_dot_product_attention(q, k, k, is_causal=True)
        found = milliseconds(runs, repeats=3)
        for precision in precisions:
            row = {"indexer": name, "precision": precision, "keys": args.keys, "ms": found[precision]}
            rows.append(row | {"dense ms": found["dense"], "share of dense": found[precision] / found["dense"]})
            print({key: round(x, 4) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
        del q, k, runs, inputs, given
        torch.cuda.empty_cache()
    memory = [memory_of(queries, args.long) for queries in (4096, 65536)]
    if args.json:
        bars = [
            {"name": "at most 12 % of dense attention", "workload": f"{row['indexer']}, {row['precision']}",
             "bar": "12.0%", "value": f"{row['share of dense']:.1%}", "ok": row["share of dense"] <= 0.12}
            for row in rows
        ] + [
            {"name": "at most 8 GB", "workload": f"{row['queries']:,} queries of {row['keys']:,} keys",
             "bar": "8 GB", "value": f"{row['GiB in all'] * 1.0737:.1f} GB", "ok": row["GiB in all"] * 1.0737 <= 8}
            for row in memory
        ]  # fmt: skip
        args.json.write_text(json.dumps({"rows": rows, "memory": memory, "bars": bars}))


if __name__ == "__main__":
    main()
