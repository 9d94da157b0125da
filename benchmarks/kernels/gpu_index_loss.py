# SPDX-License-Identifier: Apache-2.0
r"""Time the loss of an indexer and its gradients on a GPU: kernels, pieces in PyTorch, and dense attention beside them.

    python benchmarks/kernels/gpu_index_loss.py --json gpu_index_loss.json

Loss and gradients of both are compared first. Dense attention is causal SDPA of the same q heads, forward and backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_tokens import milliseconds
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx

# sequences and tokens of each; q heads, kv heads and head_dim; indexer heads and width; chosen tokens
SHAPES = {
    "8/2 heads of 64, 4 index heads of 32": ((4, 8192), (8, 2, 64), (4, 32), 1024),
    "32/8 heads of 128, 4 index heads of 64": ((1, 16384), (32, 8, 128), (4, 64), 2048),
    "32/8 heads of 128, 4 index heads of 64 ": ((1, 65536), (32, 8, 128), (4, 64), 2048),
    "16 heads of 576 (MLA), 16 index heads of 128": ((1, 65536), (16, 1, 576), (16, 128), 2048),
}
MOST = 1 << 15  # tokens up to which pieces are timed


def draw(batch: tuple[int, int], heads: tuple[int, int, int], indexer: tuple[int, int]) -> tuple[Any, Any]:
    """Draw an indexer's q, k and weights, and q and k of attention."""
    normal = lambda *shape: torch.randn(*batch, *shape, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (normal(*indexer), normal(indexer[1]), normal(indexer[0]))]
    return leaves, (normal(heads[0], heads[2]), normal(heads[1], heads[2]))


def step(leaves: Any, attention: Any, chosen: torch.Tensor | None, backend: str) -> list[torch.Tensor]:
    """Return loss and gradients."""
    loss = dx.index_loss(*leaves, *attention, block_indices=chosen, backend=backend).loss
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def check(leaves: Any, attention: Any, chosen: torch.Tensor | None) -> None:
    """Compare the kernels with the pieces.

    Raises:
        SystemExit: the loss differs by more than 0.1 %, or a gradient by more than 2 % of its norm.
    """
    one, other = (step(leaves, attention, chosen, backend) for backend in ("triton", "reference"))
    for name, x, y in zip(("loss", "dq", "dk", "dweights"), one, other, strict=True):
        error = float((x.double() - y.double()).norm() / y.double().norm())
        if not error < (1e-3 if name == "loss" else 2e-2):
            raise SystemExit(f"{name} differs by {error:.2e}")


def dense(batch: tuple[int, int], heads: tuple[int, int, int]) -> Callable[[], Any]:
    """Return a function that computes dense attention and its gradients, with heads repeated."""
    shape = (batch[0], heads[0], batch[1], heads[2])
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    return lambda: torch.autograd.grad(scaled_dot_product_attention(*inputs, is_causal=True).sum(), inputs)


def measure(name: str, repeats: int) -> list[dict[str, Any]]:
    """Check and time one shape, over all keys and over chosen ones."""
    batch, heads, indexer, count = SHAPES[name]
    few = draw((2, 2000), heads, indexer)
    check(*few, None)
    check(*few, dx.index_tokens(*(x.detach() for x in few[0]), dx.TopKTokens(300)))
    leaves, attention = draw(batch, heads, indexer)
    choices = {"all": None, f"{count:,}": dx.index_tokens(*(x.detach() for x in leaves), dx.TopKTokens(count))}
    runs = {over: partial(step, leaves, attention, chosen, "triton") for over, chosen in choices.items()}
    if batch[0] * batch[1] <= MOST:
        for over, chosen in choices.items():
            runs[f"{over} in pieces"] = partial(step, leaves, attention, chosen, "reference")
    if heads[2] <= 128:
        runs["dense"] = dense(batch, heads)
    found, rows = milliseconds(runs, repeats), []
    for over in choices:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        runs[over]()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        pieces = found.get(f"{over} in pieces")
        row = {"shape": name.strip(), "tokens": f"{batch[0]} x {batch[1]:,}", "over": over, "ms": found[over]}
        row |= {"pieces ms": pieces, "speed-up": pieces / found[over] if pieces else None}
        rows.append(row | {"dense ms": found.get("dense"), "GiB": peak})
        print({key: round(x, 4) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of shapes; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here, for `record.py --from`")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for i in args.shapes or range(len(SHAPES)):
        rows += measure(list(SHAPES)[i], args.repeats)
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
