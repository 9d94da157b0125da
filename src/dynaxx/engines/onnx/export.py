# SPDX-License-Identifier: Apache-2.0
"""`export_onnx`: write a model and its policy as ONNX files for ONNX Runtime and other engines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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
from dynaxx.engines.portable import PortableModel
from dynaxx.engines.portable.manifest import MANIFEST, copy_tokenizer
from dynaxx.engines.portable.plans import PortableRules, is_causal, portable_rules
from dynaxx.integrations.runtime.policy_events import without_guard
from dynaxx.integrations.transformers.decoder import Decoder
from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.policy import Policy, policy_digest, resolve, save_policy
from dynaxx.storage import check_new_folder, new_folder

DOMAIN, OPERATOR = "com.microsoft", "MatMulNBits"
BLOCK = 32  # input channels that share a scale
ZERO = 128  # stored value of a weight of 0
INT8 = 4  # the operator's `accuracy_level` at which inputs are rounded to 8 bits, and products are those of integers


def with_int8_weights(graph: Any) -> Any:
    """Store the weights of a traced graph's linear layers in 8 bits, in place, and return the graph.

    Embeddings, norms and attention stay in fp32. An embedding that the last layer shares is stored both ways.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    main = graph.graph
    for node in list(main):
        weight = _weight(node)
        if weight is None:
            continue
        inputs, outputs = weight.shape
        parts = dict(zip(("int8", "scales"), int8_blocks(weight), strict=True))
        stored = [ir.Value(name=f"{node.name}.{name}", const_value=ir.tensor(part)) for name, part in parts.items()]
        for value in stored:
            main.register_initializer(value)
        sizes = {"K": inputs, "N": outputs, "bits": 8, "block_size": BLOCK, "accuracy_level": INT8}
        made = [ir.node(OPERATOR, [node.inputs[0], *stored], sizes, domain=DOMAIN, name=node.name)]
        if len(node.inputs) == 3:  # the bias of a Gemm
            made.append(ir.node("Add", [made[0].outputs[0], node.inputs[2]]))
        ir.convenience.replace_nodes_and_values(main, node, [node], made, node.outputs, made[-1].outputs)
    main.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(graph)  # with the weights in fp32 that nothing reads any more
    return graph


def _weight(node: Any) -> NDArray[Any] | None:
    """Return the weight (inputs, outputs) of a linear layer, or None for other nodes."""
    flags = {name: each.value for name, each in node.attributes.items()}
    plain = all(flags.get(name, wanted) == wanted for name, wanted in (("transA", 0), ("alpha", 1.0), ("beta", 1.0)))
    if node.op_type not in ("MatMul", "Gemm") or not plain:
        return None
    value = node.inputs[1]
    transpose = value.producer() if value.producer() is not None and value.producer().op_type == "Transpose" else None
    constant = (value if transpose is None else transpose.inputs[0]).const_value
    if constant is None or len(constant.shape) != 2:
        return None
    weight: NDArray[Any] = constant.numpy()
    return weight if (transpose is None) != bool(flags.get("transB")) else weight.T


def int8_blocks(weight: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a weight (K, N) fp32 in blocks of its input channels: values (N, blocks, 32) uint8 and scales (N, blocks).

    `weight[k, n] = (values[n, k // 32, k % 32] - 128) * scales[n, k // 32]`, rounded. The last block is filled with 0.
    """
    inputs, outputs = weight.shape
    padded = np.pad(weight, ((0, -inputs % BLOCK), (0, 0))).T.reshape(outputs, -1, BLOCK)
    scales = np.abs(padded).max(-1) / 127
    values = np.rint(padded / np.where(scales == 0, 1, scales)[..., None]) + ZERO
    return values.astype(np.uint8), scales.astype(np.float32)


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
