# SPDX-License-Identifier: Apache-2.0
"""Compute a language model's next-token loss over long texts without holding all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.finite import check_finite
from dynaxx.lab.texts import encode
from dynaxx.lab.time_budget import PASS, TimeBudget

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
