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
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.decoder import Decoder, window_of

NAME = "dynaxx_openvino"  # name in the registry of transformers
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
    with _causal_attention(found.owner):
        return convert_prefill(_Prefill(model, all_logits))


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


class _Prefill(nn.Module):
    """Module that computes the logits of a prompt."""

    def __init__(self, model: nn.Module, all_logits: bool) -> None:
        super().__init__()
        self.model, self.kept = model, {} if all_logits else {"logits_to_keep": 1}

    def forward(self, input_ids: Tensor) -> Tensor:
        # Without positions, transformers would look for packed sequences in the ids.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        logits: Tensor = self.model(input_ids=input_ids, position_ids=positions, use_cache=False, **self.kept).logits
        return logits


@contextlib.contextmanager
def _causal_attention(owner: Any) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    before = owner.config._attn_implementation
    owner.set_attn_implementation(NAME)
    try:
        yield
    finally:
        owner.set_attn_implementation(before)


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    wrong = [name for name in ("softcap", "s_aux", "sinks", "position_bias") if kwargs.get(name) is not None]
    if wrong:
        raise UnsupportedInputError(type(module).__name__, {"openvino": [f"{name} is not served" for name in wrong]})
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (repeated(x, groups) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=kwargs.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
