# SPDX-License-Identifier: Apache-2.0
"""Rows of torch: transformers as it comes, and torch at its best, dense and with dynaxx.

At its best: linear layers on oneDNN where that is faster, MLPs and norms compiled by inductor, which fuses their
elementwise parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.cpu_engines.engines import Attention, EngineRow, Given, Precision, Prefill, prefill_of

from dynaxx.integrations.onednn import use_onednn
from dynaxx.integrations.transformers import apply


def torch_rows(precision: Precision) -> list[EngineRow]:
    """Return the rows of torch for one precision."""
    rows = [
        EngineRow("transformers", "dense", precision, _made(precision, "dense", best=False)),
        EngineRow("transformers", "policy", precision, _made(precision, "policy", best=False)),
    ]
    best: tuple[Attention, ...] = ("dense", "exact", "policy")
    return rows + [
        EngineRow("torch at its best", attention, precision, _made(precision, attention, best=True))
        for attention in best
    ]


def _made(precision: Precision, attention: Attention, *, best: bool) -> Callable[[Given], Prefill]:
    def make(given: Given) -> Prefill:
        model = given.model(precision)
        if best:
            use_onednn(model)
            _compile_parts(model)
        if attention != "dense":
            apply(model, given.policy if attention == "policy" else None)
        return prefill_of(model)

    return make


def _compile_parts(model: Any) -> None:
    """Compile the modules between attention and the linear layers; all layers share their code."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "mlp" or type(module).__name__.endswith("RMSNorm"):
            module.compile(dynamic=True)
