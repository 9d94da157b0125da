# SPDX-License-Identifier: Apache-2.0
"""`export_onnx`: write a model and its policy as ONNX files for ONNX Runtime and other engines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

import dynaxx
from dynaxx.arguments import typed
from dynaxx.engines.onnx.graph import OPSET, check_graph, decoder_graph, encoder_graph, save_graphs
from dynaxx.engines.onnx.operators import (
    attend_by_operator,
    attend_tokens_first,
    with_plain_operators,
    with_plans,
)
from dynaxx.engines.onnx.packages import require
from dynaxx.engines.onnx.plans import OperatorPlan, operator_plans
from dynaxx.engines.onnx.weights import with_int8_weights
from dynaxx.engines.portable import PortableModel
from dynaxx.engines.portable.manifest import MANIFEST
from dynaxx.engines.portable.plans import PortableRules, is_causal, portable_rules
from dynaxx.engines.portable.tokenizer import copy_tokenizer
from dynaxx.integrations.runtime.unguarded import without_guard
from dynaxx.integrations.transformers.decoder import Decoder
from dynaxx.policy import Policy, policy_digest, resolve, save_policy
from dynaxx.storage import check_new_folder, new_folder

Form = Literal["auto", "portable", "custom"]
Weights = Literal["fp32", "int8"]
VERSION = 1  # version of the manifest


class OnnxExport(NamedTuple):
    """Result of an export.

    Attributes:
        folder: folder with the graphs, `weights.bin`, `dynaxx.json`, for a policy `policy.json`, and the tokenizer.
        form: "portable" or "custom".
        graphs: names of the graphs: "prefill" and "decode", or "model".
        opset: version of ONNX's operator set.
        bytes: size of all files.
    """

    folder: Path
    form: str
    graphs: tuple[str, ...]
    opset: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**self._asdict(), "folder": str(self.folder), "graphs": list(self.graphs)}


@typed
def export_onnx(
    model: nn.Module,
    out: str | os.PathLike[str],
    policy: Policy | None = None,
    *,
    form: Form = "auto",
    window: int | tuple[int, int] | None = None,
    all_logits: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    weights: Weights = "fp32",
) -> OnnxExport:
    """Export a transformers model and its policy to ONNX, with its KV cache as inputs and outputs.

    The portable form uses plain ONNX operators and supports static rules and the model's own windows. `prefill.onnx`
    gathers the keys of each block of queries. `decode.onnx` sees all keys; it runs decode steps, and prompts below the
    policy's border. An encoder is one `model.onnx`. The custom form is one `model.onnx` with an operator
    `dynaxx::SparseAttention` for each layer, which runs on dynaxx's C++ core and also supports dynamic rules. Batch and
    lengths are dynamic.

    Args:
        model: a decoder or an encoder of transformers, in eval mode, on a CPU.
        out: an empty or missing folder. It appears only when the export is complete.
        policy: policy for a decoder of this shape; see `load_policy`. None exports only the model's own windows.
        form: "portable", "custom", or "auto", which is portable if every rule is static and custom otherwise.
        window: window of an encoder, as in `dynaxx.apply`.
        all_logits: return the logits of every token instead of the last one only.
        tokenizer: the model's folder in Hugging Face's format; its tokenizer and configs are copied beside the graphs.
        weights: "int8" stores those of linear layers in 8 bits, with a scale for 32 input channels. ONNX Runtime's
            operator `MatMulNBits` computes with them. Embeddings, inputs and outputs stay in fp32.

    Returns:
        The files and settings of the export.

    Raises:
        ImportError: a package of the extra `[onnx]` is missing.
        ValueError: `out` already exists, `tokenizer` has none, or the model trains, is on a GPU or not in fp32.
        PolicyError: the policy is for another model.
        UnsupportedInputError: this form cannot represent the policy.
        OSError: the folder cannot be written, for example on a full disk. No files remain.
    """
    require("onnx", "onnxscript", "onnx_ir")
    check_new_folder(Path(out))
    _check_model(model)
    policy = None if policy is None else without_guard(policy, "ONNX Runtime")
    made = _Export.of(model, policy, form, window)
    with new_folder(Path(out)) as folder:
        graphs = made.graphs(model, all_logits, weights)
        copy_tokenizer(tokenizer, folder)
        save_graphs(graphs, folder)
        for name in graphs:
            check_graph(folder / f"{name}.onnx")
        if policy is not None:
            save_policy(policy, folder / "policy.json")
        manifest = {
            "format": "dynaxx.onnx",
            "version": VERSION,
            "form": made.form,
            "opset": OPSET,
            "graphs": list(graphs),
            "model_type": str(Decoder.of(model).config.model_type),
            "layers": len(Decoder.of(model).layers),
            "causal": made.causal,
            "all_logits": all_logits,
            "weights": weights,
            "sparse_from": 0 if policy is None else policy.border,
            "policy": None if policy is None else policy_digest(policy),
            "versions": _versions(),
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        size = sum(file.stat().st_size for file in folder.iterdir())
    return OnnxExport(Path(out), made.form, tuple(graphs), OPSET, size)


class _Export(NamedTuple):
    """Contents of the graphs."""

    form: str
    causal: bool
    rules: dict[int, PortableRules]  # rules of the portable form
    dense: dict[int, PortableRules]  # the same without the policy
    plans: dict[int, OperatorPlan]  # rules of the custom form

    @classmethod
    def of(cls, model: nn.Module, policy: Policy | None, form: Form, window: int | tuple[int, int] | None) -> _Export:
        causal = is_causal(Decoder.of(model))
        if form == "auto":
            dynamic = policy is not None and any(not plan.is_static for plan in resolve(policy).values())
            form = "custom" if dynamic else "portable"
        if form == "custom":
            return cls(form, causal, {}, {}, operator_plans(model, policy, window))
        return cls(form, causal, portable_rules(model, policy, window), portable_rules(model, None, window), {})

    def graphs(self, model: nn.Module, all_logits: bool, weights: Weights) -> dict[str, Any]:
        """Return the graphs by name."""
        custom = self.form == "custom"
        attend = attend_tokens_first if custom and not self.causal else attend_by_operator
        traced = PortableModel(model, last_logits=not all_logits, attend=attend)
        graph = decoder_graph(traced, traced.empty_cache()) if self.causal else encoder_graph(traced)
        if weights == "int8":
            with_int8_weights(graph)
        if custom:
            return {"model": with_plans(graph, self.plans)}
        if not self.causal:
            return {"model": with_plain_operators(graph, self.rules, causal=False)}
        return {
            "prefill": with_plain_operators(graph, self.rules, causal=True),
            "decode": with_plain_operators(graph, self.dense, causal=True),
        }


def _check_model(model: nn.Module) -> None:
    if model.training:
        raise ValueError("`model` must be in eval mode, or dropout would be exported: call model.eval()")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes - {torch.float32}:
        raise ValueError(f"`model` must be in fp32, got {sorted(map(str, dtypes))}: call model.float()")
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device != "cpu":
        raise ValueError(f"`model` must be on the CPU to be exported, got {device}: call model.cpu()")


def _versions() -> dict[str, str]:
    import onnx
    import onnxscript
    import transformers

    packages = (torch, transformers, onnx, onnxscript)
    return {"dynaxx": dynaxx.__version__, **{each.__name__: str(each.__version__) for each in packages}}
