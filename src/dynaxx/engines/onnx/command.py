# SPDX-License-Identifier: Apache-2.0
"""`dynaxx export --format onnx`: read the model and the options, then export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynaxx.engines.onnx.export import OnnxExport, export_onnx
from dynaxx.engines.onnx.packages import require
from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.policy import Policy
from dynaxx.storage import check_new_folder

OPTIONS = ("form", "logits", "weights", "window")


def export_model(folder: Path, policy: Policy | None, out: Path, options: Mapping[str, str]) -> OnnxExport:
    """Export the model in a folder of Hugging Face's format.

    Raises:
        ValueError: an option is unknown or invalid; also see `export_onnx`.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ValueError(f"--option must be one of {', '.join(OPTIONS)}, got {unknown[0]}")
    form, logits, weights = (options.get(*each) for each in (("form", "auto"), ("logits", "last"), ("weights", "fp32")))
    if form not in ("auto", "portable", "custom"):
        raise ValueError(f"--option form must be auto, portable or custom, got {form!r}")
    if logits not in ("last", "all"):
        raise ValueError(f"--option logits must be last or all, got {logits!r}")
    if weights not in ("fp32", "int8"):
        raise ValueError(f"--option weights must be fp32 or int8, got {weights!r}")
    window = _window(options.get("window"))
    require("onnx", "onnxscript", "onnx_ir", "transformers")
    check_new_folder(out)  # before the model is loaded
    model = _load(folder)
    return export_onnx(
        model,
        out,
        policy,
        form=form,  # type: ignore[arg-type]
        window=window,
        all_logits=logits == "all",
        tokenizer=folder,
        weights=weights,  # type: ignore[arg-type]
    )


def _window(given: str | None) -> int | tuple[int, int] | None:
    if given is None:
        return None
    sides = given.split(",")
    if not 1 <= len(sides) <= 2 or not all(side.isascii() and side.isdecimal() for side in sides):
        raise ValueError(f"--option window must be W or LEFT,RIGHT, got {given!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _load(folder: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = from_folder(AutoConfig, folder)
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ())
    kind: Any = AutoModelForCausalLM if causal else AutoModel
    model: nn.Module = from_folder(kind, folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()
