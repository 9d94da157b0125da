# SPDX-License-Identifier: Apache-2.0
"""Whole requests against the dense model: the next-token distribution after a prompt, computed again in the background.

The comparison is one more dense prefill of that prompt, beside the requests; it is sampled rarely.
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
from dynaxx.integrations.transformers.decoder import Decoder
from dynaxx.policy.rollout import Choice

COMPARISON = Choice((False,), DenseReason.COMPARISON.value)
_COMPARING: ContextVar[bool] = ContextVar("dynaxx_comparing", default=False)


def comparing() -> bool:
    """Whether the pass that starts is one of ours."""
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
    """Have the first prompt of a pass compared, if it is a whole prompt without padding. Never raises.

    Args:
        arguments: the decoder's own, by name.
        output: what it returned.
    """
    try:
        ids, hidden, mask = arguments.get("input_ids"), output[0], arguments.get("attention_mask")
        if ids is None or torch.is_grad_enabled() or hidden.shape[1] != ids.shape[1]:
            return
        cache = getattr(output, "past_key_values", None)
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
    """KL(dense || sparse) of the token after a prompt, nats; None for a model without a language head.

    Args:
        ids: (1, N) the prompt.
        last: (1, hidden_size) what the decoder made of its last token.
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
