# SPDX-License-Identifier: Apache-2.0
"""A decoder with its KV cache in OpenVINO: the conversion, and a loop that generates tokens.

The cache is OpenVINO's state, one variable per layer for keys and one for values:

    input_ids -> layer N: ReadValue -> Concat(past, new) -> attention -> logits
                                            |
                                          Assign
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dynaxx.arguments import typed
from dynaxx.engines.openvino.packages import openvino
from dynaxx.engines.portable import PortableModel
from dynaxx.engines.portable.greedy import greedy

SAMPLE = 160  # tokens of the traced call
CAUSAL = ["dynaxx", "causal"]  # note in a model: its masks show the keys up to each query's own, bottom-right aligned


class OpenVinoGenerator:
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

    def step(self, input_ids: NDArray[Any] | Tensor) -> NDArray[Any]:
        """Run tokens (batch, seqlen) after those in the cache, and return the logits.

        A prompt may come in parts. The cache keeps the batch size of its first tokens until `reset`.
        """
        ids = np.ascontiguousarray(np.asarray(input_ids, dtype=np.int64))
        if ids.ndim != 2 or not ids.size:
            raise ValueError(f"`input_ids` must be (batch, seqlen) with one token or more, got {ids.shape}")
        return np.array(self._request.infer({"input_ids": ids})["logits"])

    def generate(
        self,
        input_ids: NDArray[Any] | Tensor,
        max_new_tokens: int,
        *,
        attention_mask: NDArray[Any] | Tensor | None = None,
        eos: int | None = None,
    ) -> Iterator[NDArray[Any]]:
        """Yield the most likely next tokens (batch,) one by one, up to a maximum or until all sequences have ended.

        Args:
            input_ids: prompts (batch, seqlen), padded on any side.
            max_new_tokens: the maximum.
            attention_mask: (batch, seqlen), 0 for padding. Prompts of one length run together, with a cache of their
                own; that of `step` stays as it is.
            eos: token that ends a sequence, and that it yields from then on.

        Raises:
            ValueError: the mask is not for these prompts, or shows nothing of one.
        """
        mask = None if attention_mask is None else np.asarray(attention_mask)
        start = lambda: OpenVinoGenerator(self._compiled).step
        return greedy(start, np.asarray(input_ids), max_new_tokens, attention_mask=mask, eos=eos)


@typed
def convert_with_cache(model: nn.Module, *, all_logits: bool) -> Any:
    """Convert a decoder to a model whose state is its cache; see `to_openvino`."""
    ov = openvino()
    traced = PortableModel(model, attend=_attend, last_logits=not all_logits).eval()
    ids, empty = torch.zeros(2, SAMPLE, dtype=torch.int64, device="cpu"), traced.empty_cache()
    past = [torch.zeros(2, each.shape[1], 48, each.shape[3], dtype=torch.float32, device="cpu") for each in empty]
    batch, seqlen, length = (torch.export.Dim(name, min=2) for name in ("batch", "seqlen", "past"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            traced,
            (ids, past),
            dynamic_shapes=({0: batch, 1: seqlen}, [{0: batch, 2: length}] * len(past)),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        converted = ov.convert_model(program)
    _keep_as_state(ov, converted, empty)
    converted.set_rt_info(True, CAUSAL)
    return converted


def _keep_as_state(ov: Any, model: Any, cache: list[Tensor]) -> None:
    """Turn the inputs and outputs of the cache into states that begin with no tokens."""
    names = [f"{'key' if i % 2 == 0 else 'value'}.{i // 2}" for i in range(len(cache))]
    model.inputs[0].get_tensor().set_names({"input_ids"})
    model.outputs[0].get_tensor().set_names({"logits"})
    for i, (name, each) in enumerate(zip(names, cache, strict=True)):
        model.inputs[1 + i].get_tensor().set_names({f"past_{name}"})
        model.outputs[1 + i].get_tensor().set_names({f"present_{name}"})
        model.inputs[1 + i].get_node().set_partial_shape(ov.PartialShape([-1, each.shape[1], -1, each.shape[3]]))
    model.validate_nodes_and_infer_types()
    passes = importlib.import_module("openvino.passes")
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


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Attend to the keys up to each query's own: (B, Hq, N, D), (B, H, M, D), (B, H, M, D) to (B, N, Hq, D)."""
    groups, seqlen_q, seqlen_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    if groups > 1:
        k, v = (repeated(x, groups) for x in (k, v))
    rows = torch.arange(seqlen_q, device="cpu")[:, None] + (seqlen_k - seqlen_q)
    shown = (rows >= torch.arange(seqlen_k, device="cpu"))[None, None]
    return scaled_dot_product_attention(q, k, v, shown, scale=scale).transpose(1, 2).contiguous()


def repeated(x: Tensor, groups: int) -> Tensor:
    """Repeat each kv head `groups` times, (B, H, M, D) to (B, H * groups, M, D)."""
    batch, heads, seqlen, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, groups, seqlen, head_dim).reshape(batch, heads * groups, seqlen, head_dim)
