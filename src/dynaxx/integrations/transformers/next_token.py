# SPDX-License-Identifier: Apache-2.0
"""Compare requests with the dense model, by the next-token distribution after a prompt.

The comparison runs another dense prefill of the prompt in the background, and is therefore sampled rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.guarding import LiveGuard
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.decoder import Decoder, cache_of
from dynaxx.policy.rollout import ChosenRequests

COMPARISON = ChosenRequests((False,), DenseReason.COMPARISON.value)
_COMPARING: ContextVar[bool] = ContextVar("dynaxx_comparing", default=False)


def comparing() -> bool:
    """Return whether the current pass is a comparison of the guard."""
    return _COMPARING.get()


@contextmanager
def _comparison() -> Iterator[None]:
    token = _COMPARING.set(True)
    try:
        yield
    finally:
        _COMPARING.reset(token)


def compare_later(
    decoder: Callable[[], Decoder | None],
    guard: LiveGuard,
    background: Background,
    arguments: dict[str, Any],
    output: Any,
) -> None:
    """Queue a comparison of the first prompt of a pass, if it is a whole prompt without padding. Never raises.

    Args:
        decoder: a function that returns the model's decoder, or None if it no longer exists.
        guard: the guard that gets the result.
        background: the thread that runs the comparison.
        arguments: the decoder's arguments by name.
        output: the decoder's output.
    """
    try:
        ids, hidden, mask = arguments.get("input_ids"), output[0], arguments.get("attention_mask")
        if ids is None or torch.is_grad_enabled() or hidden.shape[1] != ids.shape[1]:
            return
        cache = cache_of(output)
        if cache is not None and int(cache.get_seq_length()) != ids.shape[1]:
            return
        if mask is not None and not (mask.ndim == 2 and bool((mask[0] != 0).all())):
            return
        ids, last = ids[:1].clone(), hidden[:1, -1].clone()

        def job() -> None:
            found = decoder()
            if found is not None:
                kl = next_token_kl(found, ids, last)
                if kl is not None:
                    guard.judge_request(kl)

        if not background.submit(job):
            guard.left_out("dropped")
    except Exception as error:
        guard.failed(error)


@torch.no_grad()
def next_token_kl(decoder: Decoder, ids: Tensor, last: Tensor) -> float | None:
    """Return KL(dense || sparse) in nats of the token after a prompt, or None for a model without a language head.

    Args:
        decoder: the model's decoder.
        ids: (1, N) token ids of the prompt.
        last: (1, hidden_size) hidden state of the last token.
    """
    head = decoder.owner.get_output_embeddings()
    if head is None:
        return None
    with _comparison():
        dense = decoder.body(input_ids=ids, use_cache=False)[0][:, -1]
    cap = getattr(decoder.config, "final_logit_softcapping", None)
    logits = (head(hidden).float() for hidden in (dense, last))
    p, q = ((x if cap is None else torch.tanh(x / cap) * cap).log_softmax(-1) for x in logits)
    return max(0.0, float((p.exp() * (p - q)).sum()))
