# SPDX-License-Identifier: Apache-2.0
r"""Time attention over chosen tokens on a GPU by how many tokens a query has in common with the query before it.

    python benchmarks/kernels/gpu_token_overlap.py --json overlap.json

32/8 heads of 128, 2,048 tokens per query, without the lists: the portable kernels beside those for Hopper ("rows"),
and the portable forward with 1, 4 and 16 queries per tile ("tiles"). All calls of a line take turns in one process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_tokens
import torch
from gpu_tokens import SHAPES, choices, milliseconds

from dynaxx.kernels.tokens.gpu.config import TileRows
from dynaxx.kernels.tokens.gpu.plan import prepare_rows
from dynaxx.kernels.tokens.hopper import operators as hopper
from dynaxx.kernels.tokens.triton import operators as portable
from dynaxx.layout.tokens import TokenSpans

SHAPE = next(shape for shape in SHAPES if shape.name == "GQA 32/8 of 128")
SCALE = SHAPE.dim**-0.5
OVERLAPS = {"0%": 1, "50%": 2, "75%": 4, "94%": 16}  # queries after which a token of a list is drawn again


def inputs(queries: int, keys: int, refresh: int) -> tuple[list[torch.Tensor], torch.Tensor, TokenSpans]:
    """Draw q, k, v, the choices of the last queries, and their positions."""
    q, k, v = (x[0].detach() for x in SHAPE.inputs(queries, keys))
    with patch.object(gpu_tokens, "REFRESH", refresh):
        chosen = choices(queries, keys, SHAPE.tokens, 1)[0]
    return [q, k, v], chosen, TokenSpans((0, queries), (0, keys))


def by_kernels(queries: int, keys: int, overlap: str) -> dict[str, Any]:
    """Time forward and backward of the portable kernels and of those for Hopper."""
    rows, chosen, spans = inputs(queries, keys, OVERLAPS[overlap])
    runs: dict[str, Callable[[], Any]] = {}
    for name, kernels in (("64 rows", portable), ("128 rows", hopper)):
        plan = kernels.prepare(chosen, spans, *rows)
        out, lse = kernels.forward(*rows, plan, SCALE)
        do = torch.randn_like(out)
        runs[f"forward, {name}"] = lambda kernels=kernels, plan=plan: kernels.forward(*rows, plan, SCALE)
        runs[f"backward, {name}"] = lambda kernels=kernels, plan=plan, do=do, out=out, lse=lse: kernels.backward(
            do, torch.zeros_like(lse), *rows, out, lse, plan, SCALE
        )
    return {"keys": keys, "overlap": overlap} | milliseconds(runs, 3)


def by_tiles(queries: int, keys: int, overlap: str) -> dict[str, Any]:
    """Time the portable forward with different numbers of queries per tile."""
    rows, chosen, spans = inputs(queries, keys, OVERLAPS[overlap])
    runs: dict[str, Callable[[], Any]] = {}
    for per_tile in (1, 4, 16):
        plan = prepare_rows(chosen, spans, rows[0], rows[1], TileRows(per_tile, SHAPE.q_heads // SHAPE.kv_heads, 1))
        name = "1 query" if per_tile == 1 else f"{per_tile} queries"
        runs[name] = lambda plan=plan: portable.forward(*rows, plan, SCALE)
    return {"overlap": overlap} | milliseconds(runs, 3)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--json", type=Path, help="write the rows here, for `record.py --from`")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    found: dict[str, list[dict[str, Any]]] = {"rows": [], "tiles": []}
    lines = [("rows", by_kernels, 8192, keys, overlap) for keys in args.keys for overlap in ("0%", "75%", "94%")]
    lines += [("tiles", by_tiles, 4096, args.keys[0], overlap) for overlap in OVERLAPS]
    for kind, measure, queries, keys, overlap in lines:
        found[kind].append(measure(queries, keys, overlap))
        print({key: round(x, 3) if isinstance(x, float) else x for key, x in found[kind][-1].items()}, flush=True)
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
