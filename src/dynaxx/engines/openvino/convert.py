# SPDX-License-Identifier: Apache-2.0
"""`to_openvino`: convert a transformers decoder to an OpenVINO model for prompts of any length."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dynaxx.arguments import typed
from dynaxx.engines.openvino.cached import convert_with_cache, repeated
from dynaxx.engines.openvino.packages import openvino
from dynaxx.engines.portable import PortableModel
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.decoder import Decoder, window_of

SAMPLE = 160  # tokens of the traced prompt


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
    if model.training:
        raise ValueError("`model` must be in eval mode, or dropout would be converted: call model.eval()")
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device != "cpu":
        raise ValueError(f"`model` must be on the CPU to be converted, got {device}: call model.cpu()")
    found = Decoder.of(model)
    windows = [index for index, module in found.layers.items() if window_of(module)]
    if windows:
        raise UnsupportedInputError(found.facts.model_type, {"openvino": [f"layers {windows} have their own windows"]})
    if cache:
        return convert_with_cache(model, all_logits=all_logits)
    return convert_prefill(Prompts(PortableModel(model, attend=_attend, last_logits=not all_logits)))


def convert_prefill(module: nn.Module, *, traced_from: int = 2) -> Any:
    """Convert a module from `input_ids` (batch, seqlen) to logits, both dimensions dynamic.

    Args:
        module: a module in eval mode that maps token ids (batch, seqlen) to logits.
        traced_from: number of tokens from which torch guarantees one graph; OpenVINO's graph serves shorter ones too.
    """
    ov, sample = openvino(), torch.zeros(2, SAMPLE, dtype=torch.int64, device="cpu")
    batch, seqlen = torch.export.Dim("batch", min=1), torch.export.Dim("seqlen", min=traced_from)
    with torch.no_grad(), _quiet():
        program = torch.export.export(
            module.eval(),
            (sample,),
            dynamic_shapes=({0: batch, 1: seqlen},),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        converted = ov.convert_model(program)
    converted.inputs[0].get_tensor().set_names({"input_ids"})
    converted.outputs[0].get_tensor().set_names({"logits"})
    return converted


class Prompts(nn.Module):
    """Module that computes the logits of a prompt."""

    def __init__(self, portable: PortableModel) -> None:
        super().__init__()
        self.portable = portable

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of (batch, seqlen) tokens."""
        logits: Tensor = self.portable(input_ids, [])[0]
        return logits


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (repeated(x, groups) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2).contiguous()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
