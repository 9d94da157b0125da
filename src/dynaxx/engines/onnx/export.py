# SPDX-License-Identifier: Apache-2.0
"""`export_onnx`: write a model and its policy as ONNX files for ONNX Runtime and other engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dynaxx.arguments import typed
from dynaxx.engines.exporting import FORM, LOGITS, Option, check_exportable, imported, one_of, read_options
from dynaxx.engines.onnx.graph import OPSET, check_graph, decoder_graph, encoder_graph, save_graphs
from dynaxx.engines.onnx.operators import attend_by_operator, with_plain_operators, with_plans
from dynaxx.engines.onnx.plans import operator_plans
from dynaxx.engines.portable import PortableModel
from dynaxx.engines.portable.manifest import copy_tokenizer, write_manifest
from dynaxx.engines.portable.plans import is_causal, portable_rules
from dynaxx.integrations.runtime.policy_events import without_guard
from dynaxx.integrations.transformers.decoder import Decoder
from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.policy import Policy, resolve
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
    _packages()
    check_new_folder(Path(out))
    check_exportable(model)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes - {torch.float32}:
        raise ValueError(f"`model` must be in fp32, got {sorted(map(str, dtypes))}: call model.float()")
    policy = None if policy is None else without_guard(policy, "ONNX Runtime")
    with new_folder(Path(out)) as folder:
        form, graphs = _graphs(model, policy, form, window, all_logits, weights)
        copy_tokenizer(tokenizer, folder)
        save_graphs(graphs, folder)
        for name in graphs:
            check_graph(folder / f"{name}.onnx")
        size = write_manifest(
            folder,
            "onnx",
            VERSION,
            policy,
            [torch, *_packages()],
            form=form,
            opset=OPSET,
            graphs=list(graphs),
            model_type=str(Decoder.of(model).config.model_type),
            layers=len(Decoder.of(model).layers),
            causal=is_causal(Decoder.of(model)),
            all_logits=all_logits,
            weights=weights,
            sparse_from=0 if policy is None else policy.border,
        )
    return OnnxExport(Path(out), form, tuple(graphs), OPSET, size)


def _graphs(
    model: nn.Module,
    policy: Policy | None,
    form: Form,
    window: int | tuple[int, int] | None,
    all_logits: bool,
    weights: Weights,
) -> tuple[Form, dict[str, Any]]:
    """Return the form, "auto" replaced, and the graphs by name."""
    causal = is_causal(Decoder.of(model))
    if form == "auto":
        dynamic = policy is not None and any(not plan.is_static for plan in resolve(policy).values())
        form = "custom" if dynamic else "portable"
    custom = form == "custom"
    plans = operator_plans(model, policy, window) if custom else {}
    rules = {} if custom else portable_rules(model, policy, window)
    attend = partial(attend_by_operator, tokens_first=custom and not causal)
    traced = PortableModel(model, last_logits=not all_logits, attend=attend)
    graph = decoder_graph(traced, traced.empty_cache()) if causal else encoder_graph(traced)
    if weights == "int8":
        with_int8_weights(graph)
    if custom:
        return form, {"model": with_plans(graph, plans)}
    sparse = with_plain_operators(graph, rules, causal=causal)
    if not causal:
        return form, {"model": sparse}
    dense = with_plain_operators(graph, portable_rules(model, None, window), causal=True)
    return form, {"prefill": sparse, "decode": dense}


def _packages() -> list[Any]:
    """Return the packages that exports need. Raises ImportError if one is not installed."""
    return [imported(name, "pip install 'dynaxx[onnx]'") for name in ("transformers", "onnx", "onnxscript", "onnx_ir")]


def _window(text: str) -> int | tuple[int, int]:
    left, _, right = text.partition(",")
    return (int(left), int(right)) if right else int(left)


OPTIONS = {
    "form": FORM,
    "logits": LOGITS,
    "weights": one_of("fp32", "int8"),
    "window": Option("W or LEFT,RIGHT", r"\d+(,\d+)?", _window),
}


def export_model(folder: Path, policy: Policy | None, out: Path, options: Mapping[str, str]) -> OnnxExport:
    """Export the model in a folder of Hugging Face's format.

    Raises:
        ValueError: an option is unknown or invalid; also see `export_onnx`.
    """
    given = read_options(options, OPTIONS)
    all_logits = given.pop("logits", "last") == "all"
    _packages()
    check_new_folder(out)  # before the model is loaded
    return export_onnx(_load(folder), out, policy, all_logits=all_logits, tokenizer=folder, **given)


def _load(folder: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = from_folder(AutoConfig, folder)
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ())
    kind: Any = AutoModelForCausalLM if causal else AutoModel
    model: nn.Module = from_folder(kind, folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()
