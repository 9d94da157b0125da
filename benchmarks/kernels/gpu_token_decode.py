# SPDX-License-Identifier: Apache-2.0
r"""Time a decoding step over chosen tokens of a paged cache on a GPU, beside dense attention over the whole cache.

    python benchmarks/kernels/gpu_token_decode.py --json token_decode.json

Each sequence has one new query, which attends to 2,048 of its tokens. Dense attention is SDPA over a contiguous cache,
for latent attention over keys and values of 576 and 512. Outputs are compared with fp64 first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_tokens import milliseconds
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx

PAGE, TOKENS = 64, 2048
SHAPES = {"MLA 128 heads, 576/512": (128, 1, 576, 512), "GQA 32/8 of 128": (32, 8, 128, 128)}  # heads and widths


def decoding(name: str, batch: int, keys: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor], float]:
    """Return a step over chosen tokens, one over all of them, and the relative error of the first."""
    q_heads, kv_heads, dim, dim_v = SHAPES[name]
    pages = keys // PAGE
    k = torch.randn(batch * pages, PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    v = k[..., :dim_v] if dim_v < dim else torch.randn_like(k)
    table = torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
    cache = dx.PagedCache(k, v, torch.full((batch,), keys, dtype=torch.int32, device="cuda"), table)
    q = torch.randn(batch, 1, q_heads, dim, device="cuda", dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(keys, device="cuda")[:TOKENS].sort().values for _ in range(batch)])
    chosen = chosen.int()[:, None, None]
    run = lambda: dx.trained.selected_decode(q, cache, chosen, block_size=1)
    dense_k, dense_v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
    at = chosen[0, 0, 0].long()
    some_k, some_v = (x[:1, :, at].double().repeat_interleave(q_heads // kv_heads, 1) for x in (dense_k, dense_v))
    want = scaled_dot_product_attention(q[:1].transpose(1, 2).double(), some_k, some_v).transpose(1, 2)
    error = float((run()[:1].double() - want).norm() / want.norm())
    grouped = q.transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # the heads of a group as queries
    return run, lambda: scaled_dot_product_attention(grouped, dense_k, dense_v), error


def measure(name: str, batch: int, keys: int) -> dict[str, Any]:
    """Time one shape.

    Raises:
        SystemExit: outputs are wrong.
    """
    run, dense, error = decoding(name, batch, keys)
    if not error < 1e-2:
        raise SystemExit(f"wrong: {name}, relative error {error:.1e}")
    _, kv_heads, dim, dim_v = SHAPES[name]
    found = milliseconds({"ms": run, "dense ms": dense}, 21)
    gigabytes = batch * TOKENS * kv_heads * (dim if dim_v < dim else dim + dim_v) * 2 / 1e9
    return {"shape": name, "sequences": batch, "keys": keys} | found | {
        "speed-up": found["dense ms"] / found["ms"], "GB/s of chosen tokens": gigabytes / found["ms"] * 1e3
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--json", type=Path, help="write the rows here, for `record.py --from`")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    torch.manual_seed(0)
    rows = []
    for name in SHAPES:
        for batch in args.batches:
            for keys in args.keys:
                rows.append(measure(name, batch, keys))
                print({key: round(x, 3) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
                torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
