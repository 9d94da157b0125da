# SPDX-License-Identifier: Apache-2.0
"""The process of a trial (see `kernels.trials`): compare one kind of kernel with fp64, and print the reason against it.

    python -m dynaxx.lab.doctor.trial '["attention", "hopper", ["bfloat16", 128, 128, [128, 128], 4, false, true], 0]'

Each kind runs several times: the first calls go through Triton, later ones through direct launches, lists and graphs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import dynaxx as dx
from dynaxx.kernels.registry import ATTENTION, QUERY_SCORES
from dynaxx.kernels.trials import FULL, TRIED
from dynaxx.layout import BlockGrid
from dynaxx.testing import ErrorReport, check_forward, check_gradients, make_qkv

CALLS = 6  # of one function: recorded, replayed, and launched as a graph


def attention(device: torch.device, backend: str, dtype: torch.dtype, **of: Any) -> list[ErrorReport]:
    """Report the errors of attention over partial and full blocks, of several calls."""
    heads = (2 * of["group_size"], 2)
    q, k, v = make_qkv(1, 420, 517, *heads, of["head_dim"], of["head_dim_v"], dtype=dtype, device=device)
    pattern = dx.SlidingWindow(200) | dx.Sink(3) | dx.Strided(37)
    layout = pattern.layout(420, 517, block_size=tuple(of["block_size"]), device=device)
    softcap = 5.0 if of["softcap"] else None

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Any) -> tuple[Tensor, Tensor]:
        out, lse = dx.sparse_attention(q, k, v, layout, softcap=softcap, return_lse=True, backend=backend)
        return out, lse

    check = check_gradients if of["needs_grad"] else check_forward
    return [each for _ in range(CALLS) for each in check(attend, q, k, v, layout, softcap=softcap)]


def scores(device: torch.device, backend: str, dtype: torch.dtype, **of: Any) -> list[ErrorReport]:
    """Report the errors of the scores of blocks by one query per row."""
    grid = BlockGrid(1000, 1000, (of["kv_block"], of["kv_block"]), True)
    draw = torch.Generator(device).manual_seed(0)
    queries = torch.randn(1, 4, grid.q_blocks, of["head_dim"], generator=draw, device=device, dtype=torch.float32).to(
        dtype
    )
    k = torch.randn(1, 1000, 2, of["head_dim"], generator=draw, device=device, dtype=torch.float32).to(dtype)
    logits = queries.double() @ k.double().repeat_interleave(2, 2).permute(0, 2, 3, 1)
    last = torch.arange(1, grid.q_blocks + 1, device=device)[:, None] * of["kv_block"]
    logits.masked_fill_(torch.arange(1000, device=device) >= last, -torch.inf)
    exact = torch.nn.functional.pad(logits, (0, -1000 % of["kv_block"]), value=-torch.inf)
    exact = exact.unflatten(3, (-1, of["kv_block"])).logsumexp(4)
    got = QUERY_SCORES.kernels(backend).query_scores(queries, k, 0, grid)
    seen = exact.isfinite()
    error = (got.double() - exact)[seen].abs().max()
    # Products of numbers in half precision are exact in fp32; their sums round by half a unit for each term.
    budget = of["head_dim"] * torch.finfo(torch.float32).eps * float(logits[logits.isfinite()].abs().max())
    return [ErrorReport("scores", float(error), budget)]


Trials = Mapping[str, Callable[..., list[ErrorReport]]]  # functions that report errors, by operation


def reason_against(trials: Trials, operation: str, backend: str, values: Sequence[Any], index: int) -> str:
    """Run the kernels of a kind; return why they must not be used, "" if they agree with fp64."""
    of = dict(zip(TRIED[operation].fields, values, strict=True))
    dtype = getattr(torch, of.pop("dtype"))
    try:
        reports = trials[operation](torch.device("cuda", index), backend, dtype, **of)
        torch.cuda.synchronize(index)
    except Exception as error:  # whatever a new compiler raises is the reason
        if FULL.search(f"{type(error).__name__}: {error}"):  # says nothing about kernels: ends without a finding
            raise
        return f"its trial failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    wrong = [str(report) for report in reports if not report.ok]
    return f"it disagrees with the oracle: {wrong[0]}" if wrong else ""


def main(trials: Trials) -> None:
    """Run the trial that the command line names, and print its reason."""
    operation, backend, values, index = json.loads(sys.argv[1])
    torch.cuda.set_device(index)
    print(json.dumps({"reason": reason_against(trials, operation, backend, values, index)}))


if __name__ == "__main__":
    main({ATTENTION.name: attention, QUERY_SCORES.name: scores})
