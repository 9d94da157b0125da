# SPDX-License-Identifier: Apache-2.0
"""`to_openvino`: convert a transformers decoder to an OpenVINO model, and `OpenVinoGenerator`: run it with a cache.

The cache is OpenVINO's state, one variable per layer for keys and one for values:

    input_ids -> layer N: ReadValue -> Concat(past, new) -> attention -> logits
                                            |
                                          Assign
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dynaxx.arguments import typed
from dynaxx.engines.exporting import check_exportable, imported
from dynaxx.engines.portable import PortableModel
from dynaxx.engines.portable.greedy import Array, Greedy, Step
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.decoder import Decoder, window_of

OLDEST = (2025, 0)
SAMPLE = 160  # tokens of the traced prompt
CAUSAL = ["dynaxx", "causal"]  # note in a model: its masks show the keys up to each query's own, bottom-right aligned


def openvino() -> Any:
    """Return the module `openvino`. Raises ImportError if it is not installed, or too old."""
    return imported("openvino", "pip install 'dynaxx[openvino]'", OLDEST)


@typed
def to_openvino(model: nn.Module, *, all_logits: bool = False, cache: bool = False) -> Any:
    """Convert a transformers decoder to a dense `openvino.Model` with dynamic batch and length.

    Each layer's attention becomes one node with the flag "causal" and without the seqlen x seqlen mask of a plain
    conversion. The input is `input_ids` (batch, seqlen) int64, prompts of one length without padding. The output is the
    last token's logits (batch, 1, vocabulary).

    Args:
        model: a decoder in eval mode, on the CPU. It is not changed.
        all_logits: return the logits of every token.
        cache: keep the KV cache in the model's state, for `OpenVinoGenerator`: each call's tokens follow those of the
            calls before, until the state is reset. Each layer then has a mask, which a policy's operator does not read.

    Raises:
        ImportError: openvino is not installed.
        ValueError: the model is in training mode or not on a CPU.
        UnsupportedInputError: the model has windows, sinks or capped scores, which this conversion does not support.
    """
    openvino()
    check_exportable(model)
    found = Decoder.of(model)
    windows = [index for index, module in found.layers.items() if window_of(module)]
    if windows:
        raise UnsupportedInputError(found.facts.model_type, {"openvino": [f"layers {windows} have their own windows"]})
    if cache:
        return _convert_with_cache(model, all_logits=all_logits)
    return convert_prefill(Prompts(PortableModel(model, attend=_attend, last_logits=not all_logits)))


def convert_prefill(module: nn.Module, *, traced_from: int = 2) -> Any:
    """Convert a module from `input_ids` (batch, seqlen) to logits, both dimensions dynamic.

    Args:
        module: a module in eval mode that maps token ids (batch, seqlen) to logits.
        traced_from: number of tokens from which torch guarantees one graph; OpenVINO's graph serves shorter ones too.
    """
    batch, seqlen = torch.export.Dim("batch", min=1), torch.export.Dim("seqlen", min=traced_from)
    return _converted(module, (_sample(),), ({0: batch, 1: seqlen},))


def _convert_with_cache(model: nn.Module, *, all_logits: bool) -> Any:
    """Convert a decoder to a model whose state is its cache; see `to_openvino`."""
    traced = PortableModel(model, attend=_attend_after_cache, last_logits=not all_logits)
    empty = traced.empty_cache()
    past = [torch.zeros(2, each.shape[1], 48, each.shape[3], dtype=torch.float32, device="cpu") for each in empty]
    batch, seqlen, length = (torch.export.Dim(name, min=2) for name in ("batch", "seqlen", "past"))
    shapes = ({0: batch, 1: seqlen}, [{0: batch, 2: length}] * len(past))
    converted = _converted(traced, (_sample(), past), shapes)
    _keep_as_state(converted, empty)
    converted.set_rt_info(True, CAUSAL)
    return converted


def _sample() -> Tensor:
    return torch.zeros(2, SAMPLE, dtype=torch.int64, device="cpu")


def _converted(module: nn.Module, sample: tuple[Any, ...], shapes: tuple[Any, ...]) -> Any:
    """Return the OpenVINO model of a module whose first input is token ids and whose first output is logits."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            module.eval(),
            sample,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        converted = openvino().convert_model(program)
    converted.inputs[0].get_tensor().set_names({"input_ids"})
    converted.outputs[0].get_tensor().set_names({"logits"})
    return converted


def _keep_as_state(model: Any, cache: list[Tensor]) -> None:
    """Turn the inputs and outputs of the cache into states that begin with no tokens."""
    ov, passes = openvino(), imported("openvino.passes", "pip install 'dynaxx[openvino]'")
    names = [f"{'key' if i % 2 == 0 else 'value'}.{i // 2}" for i in range(len(cache))]
    for i, (name, each) in enumerate(zip(names, cache, strict=True)):
        model.inputs[1 + i].get_tensor().set_names({f"past_{name}"})
        model.outputs[1 + i].get_tensor().set_names({f"present_{name}"})
        model.inputs[1 + i].get_node().set_partial_shape(ov.PartialShape([-1, each.shape[1], -1, each.shape[3]]))
    model.validate_nodes_and_infer_types()
    manager = passes.Manager()
    manager.register_pass(passes.MakeStateful({f"past_{name}": f"present_{name}" for name in names}))
    manager.run_passes(model)
    ops = ov.opset13
    first, axis = (ops.constant(np.array(value, np.int64)) for value in ([0], 0))
    batch = ops.gather(ops.shape_of(model.input("input_ids"), output_type="i64"), first, axis)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, dim = node.get_output_partial_shape(0)
            sizes = ops.constant(np.array([heads.get_length(), 0, dim.get_length()], np.int64))
            zero = ops.constant(np.zeros((), np.float32))
            node.set_arguments([ops.broadcast(zero, ops.concat([batch, sizes], axis=0))])
    model.validate_nodes_and_infer_types()


class Prompts(nn.Module):
    """Module that computes the logits of a prompt."""

    def __init__(self, portable: PortableModel) -> None:
        super().__init__()
        self.portable = portable

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of (batch, seqlen) tokens."""
        logits: Tensor = self.portable(input_ids, [])[0]
        return logits


def _attend(
    layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, shown: Tensor | None = None
) -> Tensor:
    """Attend to the pairs `shown`, or to the keys up to each query's own: q (B, Hq, N, D) to (B, N, Hq, D)."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (_repeated(x, groups) for x in (k, v))
    found = scaled_dot_product_attention(q, k, v, shown, is_causal=shown is None, scale=scale)
    return found.transpose(1, 2).contiguous()


def _attend_after_cache(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Attend as `_attend`, with queries that are the last of the keys."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    rows = torch.arange(seqlen_q, device="cpu")[:, None] + (seqlen_k - seqlen_q)
    return _attend(layer, q, k, v, scale, mask, (rows >= torch.arange(seqlen_k, device="cpu"))[None, None])


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Repeat each kv head `groups` times, (B, H, M, D) to (B, H * groups, M, D)."""
    batch, heads, seqlen, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, groups, seqlen, head_dim).reshape(batch, heads * groups, seqlen, head_dim)


class OpenVinoGenerator(Greedy):
    """Generate tokens with a compiled model that has a cache, from `to_openvino(model, cache=True)`.

    Args:
        compiled: the result of `openvino.Core.compile_model`.

    Raises:
        ValueError: the model has no cache.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        if not self._request.query_state():
            raise ValueError("`compiled` must have a cache: convert it with to_openvino(model, cache=True)")

    def reset(self) -> None:
        """Empty the cache."""
        self._request.reset_state()

    def step(self, input_ids: Array | Tensor) -> Array:
        """Run tokens (batch, seqlen) after those in the cache, and return the logits.

        A prompt may come in parts. The cache keeps the batch size of its first tokens until `reset`.
        """
        ids = np.ascontiguousarray(np.asarray(input_ids, dtype=np.int64))
        if ids.ndim != 2 or not ids.size:
            raise ValueError(f"`input_ids` must be (batch, seqlen) with one token or more, got {ids.shape}")
        return np.array(self._request.infer({"input_ids": ids})["logits"])

    def _start(self) -> Step:
        return OpenVinoGenerator(self._compiled).step
