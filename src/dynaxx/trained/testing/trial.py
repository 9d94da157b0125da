# SPDX-License-Identifier: Apache-2.0
"""Trials of the kernels of trained sparse attention; see `dynaxx.lab.doctor.trial`."""

from __future__ import annotations

from typing import Any

import torch

from dynaxx.lab.doctor.trial import main
from dynaxx.testing import ErrorReport
from dynaxx.trained.registry import INDEXER, NSA, TOKENS
from dynaxx.trained.testing.nsa import random_selected_case
from dynaxx.trained.testing.tokens import latent_errors, random_token_case
from dynaxx.trained.tokens.spans import TokenSpans

SEEDS = 6
LATENT = ((33, 513, 65), (7, 500, 208))  # queries, keys, slots


def selected(device: torch.device, backend: str, dtype: torch.dtype, **of: Any) -> list[ErrorReport]:
    """Report the errors of attention over selected blocks."""
    sizes = {"groups": (of["group_size"],), "head_dims": (of["head_dim"],), "blocks": (of["block_size"][1],)}
    cases = [random_selected_case(seed, dtype=dtype, device=device, lengths=(130, 517), slots=(6,), **sizes)
             for seed in range(SEEDS)]  # fmt: skip
    return [report for case in cases for report in case.check(backend, of["needs_grad"])]


def tokens(device: torch.device, backend: str, dtype: torch.dtype, **of: Any) -> list[ErrorReport]:
    """Report the errors of attention over chosen tokens; values narrower than keys are those of latent attention."""
    if of["head_dim"] != of["head_dim_v"]:
        more = {"dtype": dtype, "device": device, "backend": backend, "gradients": of["needs_grad"]}
        return [report for sizes in LATENT for report in latent_errors(*sizes, heads=of["group_size"], **more)]
    sizes = {"groups": (of["group_size"],), "head_dims": ((of["head_dim"], of["head_dim_v"]),), "block_sizes": (1,)}
    cases = [random_token_case(seed, dtype=dtype, device=device, softcaps=(None,), **sizes) for seed in range(SEEDS)]
    return [report for case in cases for report in case.check(backend, of["needs_grad"])]


def indexer(device: torch.device, backend: str, dtype: torch.dtype, **of: Any) -> list[ErrorReport]:
    """Report rows whose choice differs from sorting; whole numbers make scores exact and often equal."""
    draw = torch.Generator(device).manual_seed(0)
    whole = lambda *shape: torch.randn(shape, generator=draw, device=device, dtype=torch.float32).mul(1.3).round()
    q, k, weights = whole(300, of["heads"], of["dim"]), whole(3000, of["dim"]), whole(300, of["heads"])
    scale = None if dtype.itemsize > 1 else torch.ones(len(k), device=device, dtype=torch.float32)
    spans = TokenSpans((0, len(q)), (0, len(k)))
    run = lambda name, dtype: INDEXER.kernels(name).index_tokens(q.to(dtype), k.to(dtype), weights, scale, spans, 100)
    wrong = (run(backend, dtype) != run("reference", torch.float64)).any(-1).float().mean()
    return [ErrorReport("choices", float(wrong), 0.0)]


if __name__ == "__main__":
    main({NSA.name: selected, TOKENS.name: tokens, INDEXER.name: indexer})
