# SPDX-License-Identifier: Apache-2.0
"""Compute a language model's next-token loss over long texts without holding all logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.onednn import use_onednn
from dynaxx.lab.texts import encode
from dynaxx.lab.time_budget import PASS, TimeBudget


@contextmanager
def routed(model: Any, name: str, attend: Callable[..., Any], masks: Any = None) -> Iterator[None]:
    """Let `attend` compute attention within the block, and restore the model's attention afterwards.

    Args:
        model: a transformers model.
        name: the name under which the function is registered in `AttentionInterface`, and its masks in
            `AttentionMaskInterface`. Without the latter, masks would arrive as None.
        attend: a function (module, query, key, value, attention_mask, **kwargs) -> (out, None).
        masks: the function that makes its masks; SDPA's by default.
    """
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(name, attend)
    masking.AttentionMaskInterface.register(name, masks or masking.sdpa_mask)
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(own)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model in eval mode within the block, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def check_weights(model: Any, name: str) -> None:
    """Raise ValueError if a parameter or buffer has NaN or infinity. The message names it and the model `name`."""
    for key, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_floating_point() and weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
            raise ValueError(f"{name} has NaN or infinity in {key}; its weights are broken, load another copy")


def check_finite(x: Tensor, what: str) -> None:
    """Raise ValueError if the activations `what` are not finite, usually because their dtype is too narrow."""
    if not x.isfinite().all():
        dtype = str(x.dtype).removeprefix("torch.")
        fix = "try --dtype bfloat16 or float32" if x.dtype is torch.float16 else "check its weights and its config"
        raise ValueError(f"{what} are not finite in {dtype}; {fix}")


ROWS = 512  # tokens per chunk of logits
PACE_TOKENS = 64  # tokens of the text whose pass is timed first


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Compute the fp32 logits of final hidden states (..., hidden_size), with the model's softcap if it has one."""
    logits: Tensor = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Return the cross-entropy in nats of each next token, (batch, tokens - 1) fp32, for ids (batch, tokens).

    Raises:
        ValueError: hidden states are not finite.
    """
    hidden = model.base_model(ids[:, :-1].to(model.device), use_cache=False)[0]
    check_finite(hidden, "hidden states")
    losses = []
    for start in range(0, hidden.shape[1], ROWS):
        logits = logits_of(model, hidden[:, start : start + ROWS])
        labels = ids[:, 1 + start : 1 + start + logits.shape[1]].to(logits.device)
        # The vocabulary is the last dimension: over another one, a GPU's softmax runs one thread per token.
        some = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses.append(some.view_as(labels))
    return torch.cat(losses, dim=1)


def perplexity(losses: Tensor) -> float:
    """Return exp of the mean loss."""
    return float(losses.double().mean().exp())


def measure_pace(model: Any, tokenizer: Any, text: str, time: TimeBudget) -> None:
    """Time a pass over a short text, if there is a time budget and none was timed before."""
    if time.seconds is None or (PASS, PACE_TOKENS) in time.taken:
        return
    ids = encode(tokenizer, text, 2, most=PACE_TOKENS)
    with evaluating(model):
        token_losses(model, ids[:, :2])  # the first pass reads the weights from disk
        with time.work(PASS, ids.shape[1]):
            token_losses(model, ids)


MIN_PARAMETERS = 10_000_000  # smaller models gain little, and their layers are too small to time well


@contextmanager
def fast_linears(model: Any) -> Iterator[None]:
    """Run fp32 linear layers on oneDNN within the block where it is faster on this CPU, see `use_onednn`.

    Results differ from torch's default by rounding. Never use it where times of the model are measured.
    """
    small = sum(parameter.numel() for parameter in model.parameters()) < MIN_PARAMETERS
    if small or model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        yield
        return
    with use_onednn(model):
        yield
