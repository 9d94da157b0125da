# SPDX-License-Identifier: Apache-2.0
"""Generate tokens for several prompts at once, and pass each token on as soon as it is generated.

This module does not depend on Triton. The `generate` method of transformers runs the model. Prompts of different
lengths are padded on the left, which does not affect a policy's selection. A stopping criterion, which transformers
calls with every new token, passes the tokens to their receivers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_unnamed = itertools.count()


@dataclass(frozen=True)
class Prompt:
    """One request."""

    ids: tuple[int, ...]  # token ids, at least one
    max_tokens: int  # maximum number of new tokens, at least one
    temperature: float = 0.0  # 0 selects the most likely token; above 0, tokens are sampled
    top_p: float = 1.0  # sample from the smallest set of tokens with this total probability
    seed: int | None = None  # of the sampling; None samples differently each time
    id: str = ""  # request id, for a policy that is rolled out to a share of the requests


class Receiver(Protocol):
    """Receiver of the tokens of one prompt."""

    def token(self, token: int, finish_reason: str) -> None:
        """Accept the next token. `finish_reason` is "stop" (an end token) or "length" for the last token, else ""."""

    def cancelled(self) -> bool:
        """Return whether the client no longer waits for tokens."""


class Limits:
    """Limits of a model on its requests.

    Args:
        model: a transformers model.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.context = int(getattr(config, "max_position_embeddings", None) or 2**31)

    def check(self, prompt: Prompt) -> None:
        """Check that the model can serve a prompt.

        Raises:
            ValueError: a field exceeds its limit.
        """
        count = len(prompt.ids)
        if not count:
            raise ValueError("the prompt must hold at least one token, got none")
        wrong = next((each for each in prompt.ids if not 0 <= each < self.vocabulary), None)
        if wrong is not None:
            raise ValueError(f"`input_ids` must be between 0 and {self.vocabulary - 1}, got {wrong}")
        if prompt.max_tokens < 1:
            raise ValueError(f"`max_tokens` must be >= 1, got {prompt.max_tokens}")
        if count + prompt.max_tokens > self.context:
            raise ValueError(
                f"prompt and answer must fit {self.context} tokens, got {count} + `max_tokens` {prompt.max_tokens}"
            )
        if not 0 <= prompt.temperature <= 100:
            raise ValueError(f"`temperature` must be between 0 and 100, got {prompt.temperature}")
        if not 0 < prompt.top_p <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1, got {prompt.top_p}")
        if prompt.temperature == 0 and (prompt.top_p != 1 or prompt.seed is not None):
            raise ValueError("`top_p` and `seed` need a `temperature` above 0")


def batches(prompts: Sequence[Prompt], most_tokens: int) -> list[list[int]]:
    """Group prompts of similar lengths into batches with little padding.

    Args:
        prompts: prompts in any order.
        most_tokens: maximum tokens of a batch, including padding and answers. A longer prompt runs alone.

    Returns:
        Indices into `prompts`, shortest prompts first; each index once.
    """
    found: list[list[int]] = []
    longest = answer = 0
    for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids)):
        longest, answer = len(prompts[i].ids), max(answer, prompts[i].max_tokens)
        if not found or (longest + answer) * (len(found[-1]) + 1) > most_tokens:
            found.append([])
            answer = prompts[i].max_tokens
        found[-1].append(i)
    return found


@torch.inference_mode()
def generate(model: Any, handle: Any, prompts: Sequence[Prompt], receivers: Sequence[Receiver]) -> None:
    """Generate the answers to one batch.

    Args:
        model: a causal language model of transformers.
        handle: the handle that `dynaxx.apply` returned.
        prompts: prompts within `Limits`.
        receivers: one receiver per prompt.
    """
    longest, device = max(len(prompt.ids) for prompt in prompts), model.device
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.ids) :] = torch.tensor(prompt.ids, dtype=torch.int64, device="cpu")
        mask[row, longest - len(prompt.ids) :] = 1
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if any(prompt.temperature for prompt in prompts):
        options["logits_processor"] = [_Draws(prompts)]
    ends = _end_tokens(model)
    with handle.request(*(prompt.id or f"unnamed {next(_unnamed)}" for prompt in prompts)):
        model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max(prompt.max_tokens for prompt in prompts),
            stopping_criteria=[_HandOut(prompts, receivers, ends)],
            pad_token_id=min(ends, default=0),
            **options,
        )


def _end_tokens(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)


class _HandOut:
    """Stopping criterion of transformers that passes on each row's new token and returns the finished rows."""

    def __init__(self, prompts: Sequence[Prompt], receivers: Sequence[Receiver], ends: frozenset[int]) -> None:
        self._receivers, self._ends = receivers, ends
        self._left = [prompt.max_tokens for prompt in prompts]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self._left[row]:
                continue
            receiver = self._receivers[row]
            if receiver.cancelled():
                self._left[row] = 0
                continue
            self._left[row] = 0 if token in self._ends else self._left[row] - 1
            reason = "stop" if token in self._ends else "" if self._left[row] else "length"
            receiver.token(token, reason)
        return torch.tensor([not left for left in self._left], device=input_ids.device, dtype=torch.bool)


class _Draws:
    """Logits processor of transformers that leaves each row only its sampled token."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._generators = [torch.Generator() for _ in prompts]
        for prompt, generator in zip(prompts, self._generators, strict=True):
            if prompt.seed is None:
                generator.seed()
            else:
                generator.manual_seed(prompt.seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, prompt in enumerate(self._prompts):
            if prompt.temperature:
                probability = torch.softmax(scores[row].double().cpu() / prompt.temperature, -1)
                token = _draw(probability, prompt.top_p, self._generators[row])
                scores[row] = -torch.inf
                scores[row, token] = 0.0
        return scores


def _draw(probability: Tensor, top_p: float, generator: torch.Generator) -> int:
    """Sample from the smallest set of tokens with total probability `top_p`."""
    ordered, tokens = probability.sort(descending=True, stable=True)
    kept = ordered.cumsum(0) - ordered < top_p
    return int(tokens[torch.multinomial(ordered * kept, 1, generator=generator)])


class TextStream:
    """Incremental decoder of tokens to text. A character that spans several tokens appears with its last token.

    Args:
        decode: function from token ids to their text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int, *, last: bool) -> str:
        """Add a token and return its new text."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if (text.endswith("\N{REPLACEMENT CHARACTER}") and not last) or not text.startswith(self._shown):
            return ""
        added, self._shown = text[len(self._shown) :], text
        return added
