# SPDX-License-Identifier: Apache-2.0
"""Rows of OpenVINO: its own dense attention, and dynaxx inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from benchmarks.cpu_engines.engines import Attention, EngineRow, Given, NotHereError, Precision, Prefill
from torch import Tensor

from dynaxx.engines.openvino import OpenVinoPrompts, cpu_config, insert_policy, to_openvino
from dynaxx.engines.openvino.convert import openvino
from dynaxx.policy import Policy

HINTS: dict[Precision, str] = {"fp32": "f32", "bf16": "bf16"}


def openvino_rows(precision: Precision) -> list[EngineRow]:
    """Return the rows of OpenVINO for one precision."""
    kinds: tuple[Attention, ...] = ("dense", "exact", "policy")
    return [EngineRow("OpenVINO", kind, precision, _made(precision, kind)) for kind in kinds]


def _made(precision: Precision, attention: Attention) -> Callable[[Given], Prefill]:
    def make(given: Given) -> Prefill:
        try:
            ov = openvino()
        except ImportError as error:
            raise NotHereError("not installed: pip install 'dynaxx[openvino]'") from error
        model, hint = _converted(ov, given), HINTS[precision]
        if attention == "policy":
            prompts = OpenVinoPrompts(model, given.policy, precision=hint, threads=given.threads)
            return lambda ids: torch.from_numpy(prompts(ids))[0, -1].float()
        if attention == "exact":
            insert_policy(model, Policy(model=given.policy.model), precision=hint)
        request = ov.Core().compile_model(model, "CPU", cpu_config(hint, given.threads)).create_infer_request()

        def run(ids: Tensor) -> Tensor:
            found = request.infer({0: ids.numpy()})[0]
            return torch.from_numpy(np.array(found))[0, -1].float()

        return run

    return make


def _converted(ov: Any, given: Given) -> Any:
    """Return the dense model, converted once from fp32 weights."""
    path = given.work / "model.xml"
    if not path.exists():
        ov.save_model(to_openvino(given.model("fp32")), path, compress_to_fp16=False)
    return ov.Core().read_model(path)
