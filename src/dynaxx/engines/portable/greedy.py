# SPDX-License-Identifier: Apache-2.0
"""Generate the most likely tokens with an engine whose calls take sequences of one length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Step = Callable[[Array], Array]  # (batch, seqlen) tokens after those in its cache -> (batch, tokens, vocabulary) logits


class Greedy(ABC):
    """A model that generates the most likely tokens."""

    @abstractmethod
    def _start(self) -> Step:
        """Return a step with an empty cache; called once for each length of the prompts."""

    def generate(
        self,
        input_ids: Array | Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Array | Tensor | None = None,
        eos: int | None = None,
    ) -> Iterator[Array]:
        """Yield the most likely next tokens (batch,) one by one, up to a maximum or until all sequences have ended.

        Args:
            input_ids: prompts (batch, seqlen) int64, padded on any side.
            max_new_tokens: the maximum.
            attention_mask: (batch, seqlen), 0 for padding. Prompts of one length run together, with a cache of their
                own.
            eos: token that ends a sequence, and that it yields from then on.

        Raises:
            ValueError: the prompts are not two-dimensional, or the mask is not for them, or shows nothing of one.
        """
        ids = np.asarray(input_ids)
        if ids.ndim != 2:
            raise ValueError(f"`input_ids` must be (batch, seqlen), got {ids.shape}")
        mask = np.ones(ids.shape, np.bool_) if attention_mask is None else np.asarray(attention_mask).astype(np.bool_)
        if mask.shape != ids.shape or not mask.any(1).all():
            raise ValueError("`attention_mask` must have the shape of `input_ids` and show a token of each prompt")
        lengths = mask.sum(1)
        groups = [(np.flatnonzero(lengths == length), self._start()) for length in np.unique(lengths)]
        logits = [step(ids[rows][mask[rows]].reshape(len(rows), -1)) for rows, step in groups]
        ended = np.zeros(len(lengths), np.bool_)
        for number in range(max_new_tokens):
            token = np.empty(len(lengths), np.int64)
            for (rows, _), found in zip(groups, logits, strict=True):
                token[rows] = found[:, -1].argmax(-1)
            if eos is not None:
                token[ended] = eos
                ended |= token == eos
            yield token
            if number + 1 == max_new_tokens or ended.all():
                return
            logits = [step(token[rows, None]) for rows, step in groups]
