# SPDX-License-Identifier: Apache-2.0
r"""Time attention over chosen tokens on a GPU, forward and backward, beside dense SDPA in the same process.

    python benchmarks/kernels/gpu_tokens.py --json gpu_tokens.json

Each shape is compared with fp64 first. DSA times the last queries of a sequence; grouped-query heads are timed as a
whole causal layer, in which each query has 75 % of its tokens in common with the one before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx

REFRESH = 4  # queries after which a token of a list is drawn again: 75 % are those of the query before


@dataclass(frozen=True)
class Shape:
    """One layer."""

    name: str
    q_heads: int
    kv_heads: int
    dim: int
    dim_v: int
    block_size: int
    tokens: int  # that a query chooses
    keys: int
    queries: int  # the last ones
    asked: tuple[int, int] | None = None  # TF/s, forward and backward

    def inputs(self, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q, k, v; values of latent attention are a view of the keys."""
        make = lambda count, heads, width: torch.randn(
            1, count, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        q, k = make(queries, self.q_heads, self.dim), make(keys, self.kv_heads, self.dim)
        return q, k, k[..., : self.dim_v] if self.dim_v < self.dim else make(keys, self.kv_heads, self.dim_v)


SHAPES = (
    Shape("DSA 128 heads, 576/512", 128, 1, 576, 512, 1, 2048, 32768, 4096, (480, 250)),
    Shape("GQA 32/8 of 128", 32, 8, 128, 128, 1, 2048, 32768, 32768),
    Shape("GQA 24/2 of 256, groups of 4", 24, 2, 256, 256, 4, 2048, 32768, 32768),
    Shape("GQA 32/8 of 128", 32, 8, 128, 128, 1, 2048, 65536, 65536),
    Shape("GQA 24/2 of 256, groups of 4", 24, 2, 256, 256, 4, 2048, 65536, 65536),
)


def choices(queries: int, keys: int, slots: int, size: int) -> Tensor:
    """Draw (1, queries, 1, slots) ascending blocks, one from each of `slots` stretches of what a query sees.

    A stretch's block is drawn again every `REFRESH` queries, at another query for each stretch. Early queries choose
    all that they see.
    """
    rows, slot = [], torch.arange(slots, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for start in range(0, queries, 64):
        t = torch.arange(start, min(start + 64, queries), device="cuda") + keys - queries
        blocks = (int(t[0]) + 1) // size
        if blocks <= slots:
            seen = slot <= (t // size)[:, None]
            rows.append(torch.where(seen, slot, -1).int())
            continue
        low, high = slot * blocks // slots, (slot + 1) * blocks // slots
        draws = torch.rand(64 // REFRESH + 1, slots, device="cuda", generator=generator)
        turn = (torch.arange(len(t), device="cuda")[:, None] + slot % REFRESH) // REFRESH
        rows.append((low + draws.gather(0, turn) * (high - low)).floor().int().minimum(high.int() - 1))
    return torch.cat(rows)[None, :, None]


def milliseconds(runs: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Return the median time of each call on the GPU, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-2, repeats):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 0:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in times.items()}


def check(shape: Shape, served: str = "auto") -> None:
    """Compare a small problem of the shape with fp64, forward and gradients, on a backend.

    Raises:
        SystemExit: an error above what bf16 explains.
    """
    inputs = shape.inputs(48, 512)
    chosen = choices(48, 512, 128 // shape.block_size, shape.block_size)
    leaves = inputs[:2] if shape.dim_v < shape.dim else inputs
    results = []
    for backend, dtype in ((served, torch.bfloat16), ("reference", torch.float64)):
        q, k = (x.to(dtype) for x in inputs[:2])
        v = k[..., : shape.dim_v] if shape.dim_v < shape.dim else inputs[2].to(dtype)
        out = dx.trained.selected_attention(q, k, v, chosen, block_size=shape.block_size, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for name, got, want in zip(("out", "dq", "dk", "dv"), *results, strict=False):
        error = float((got.double() - want.double()).norm() / want.double().norm())
        print(f"{shape.name}, {served}: {name} relative error {error:.1e}", flush=True)
        if not error < 1e-2:
            raise SystemExit(f"wrong: {name}")


def measure(shape: Shape, served: str = "auto") -> dict[str, Any]:
    """Time one shape: milliseconds and TF/s of visible pairs, and the same layer dense."""
    q, k, v = shape.inputs(shape.queries, shape.keys)
    chosen = choices(shape.queries, shape.keys, shape.tokens // shape.block_size, shape.block_size)
    attend = lambda: dx.trained.selected_attention(q, k, v, chosen, block_size=shape.block_size, backend=served)
    out = attend()
    do = torch.randn_like(out)
    leaves = (q, k) if shape.dim_v < shape.dim else (q, k, v)
    runs: dict[str, Callable[[], Any]] = {
        "forward": torch.no_grad()(attend),
        "backward": lambda: torch.autograd.grad(out, leaves, do, retain_graph=True),
    }
    if shape.dim_v == shape.dim:
        rows = [x.detach().transpose(1, 2) for x in (q, k, v)]
        group = shape.q_heads // shape.kv_heads
        rows = [rows[0], *(x.repeat_interleave(group, 1) for x in rows[1:])]  # what flash attention takes
        rows = [x.requires_grad_() for x in rows]
        causal = shape.queries == shape.keys
        attend_dense = lambda: scaled_dot_product_attention(*rows, is_causal=causal)
        dense_out, dense_do = attend_dense(), do.transpose(1, 2)
        runs["dense forward"] = torch.no_grad()(attend_dense)
        runs["dense backward"] = lambda: torch.autograd.grad(dense_out, rows, dense_do, retain_graph=True)
    found = milliseconds(runs)
    pairs = int((chosen >= 0).sum()) * shape.block_size * shape.q_heads
    flops = 2 * pairs * (shape.dim + shape.dim_v)
    again = 2 * pairs * (3 * shape.dim + 2 * shape.dim_v)
    row: dict[str, Any] = {f"{name} ms": each for name, each in found.items()}
    row |= {"forward TF/s": flops / found["forward"] / 1e9, "backward TF/s": again / found["backward"] / 1e9}
    for name in ("forward", "backward"):
        if f"dense {name}" in found:
            row[f"{name} speed-up"] = found[f"dense {name}"] / found[name]
    return row


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was asked of each shape: TF/s of latent attention, and to be faster than dense for the others."""
    asked = {shape.name: shape.asked for shape in SHAPES if shape.asked}
    found = []
    for row in rows:
        for step, place in (("forward", 0), ("backward", 1)):
            workload = f"{row['shape']}, {row['keys'] // 1024}k tokens"
            if row["shape"] in asked:
                bar, value = asked[row["shape"]][place], row[f"{step} TF/s"]
                name, texts = f"{step} TF/s", (f"{bar}", f"{value:.0f}")
            else:
                bar, value = 1.0, row[f"{step} speed-up"]
                name, texts = f"{step} faster than dense", ("1x", f"{value:.2f}x")
            found.append({"name": name, "workload": workload, "bar": texts[0], "value": texts[1], "ok": value >= bar})
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="numbers of shapes")
    parser.add_argument("--backend", default="auto", help="auto, triton or hopper")
    parser.add_argument("--json", type=Path, help="write the rows here, for `record.py --from`")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    for name in dict.fromkeys(SHAPES[i].name for i in args.shapes):
        check(next(shape for shape in SHAPES if shape.name == name), args.backend)
    rows = []
    for i in args.shapes:
        shape = SHAPES[i]
        rows.append({"shape": shape.name, "keys": shape.keys, "queries": shape.queries} | measure(shape, args.backend))
        print({key: round(x, 2) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps({"rows": rows, "bars": bars(rows)}))


if __name__ == "__main__":
    main()
