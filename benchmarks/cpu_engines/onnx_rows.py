# SPDX-License-Identifier: Apache-2.0
"""Rows of ONNX Runtime: plain operators for dense attention, and dynaxx's operator for every pair and the policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.cpu_engines.engines import Attention, EngineRow, Given, NotHereError, Precision, Prefill
from torch import Tensor

from dynaxx.engines.exporting import imported
from dynaxx.engines.onnx import OnnxModel, export_onnx
from dynaxx.policy import policy_digest


def onnx_rows(precision: Precision) -> list[EngineRow]:
    """Return the rows of ONNX Runtime for one precision; exports are in fp32."""
    kinds: tuple[Attention, ...] = ("dense", "exact", "policy") if precision == "fp32" else ()
    return [EngineRow("ONNX Runtime", kind, precision, _made(kind)) for kind in kinds]


def _made(attention: Attention) -> Callable[[Given], Prefill]:
    def make(given: Given) -> Prefill:
        try:
            for name in ("onnx", "onnxscript", "onnx_ir", "onnxruntime"):
                imported(name, "pip install 'dynaxx[onnx]'")
        except ImportError as error:
            raise NotHereError("not installed: pip install 'dynaxx[onnx]'") from error
        exported = OnnxModel(_exported(attention, given), threads=given.threads)

        def run(ids: Tensor) -> Tensor:
            logits, _ = exported.step(ids.numpy())
            return torch.from_numpy(logits)[0, -1].float()

        return run

    return make


def _exported(attention: Attention, given: Given) -> Path:
    """Return the folder of the export, written once."""
    policy = given.policy if attention == "policy" else None
    name = attention if policy is None else policy_digest(policy)
    folder = given.work / f"onnx-{name}"
    if not folder.exists():
        form = "portable" if attention == "dense" else "custom"
        export_onnx(given.model("fp32"), folder, policy, form=form)  # type: ignore[arg-type]
    return folder
