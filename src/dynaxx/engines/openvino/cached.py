# SPDX-License-Identifier: Apache-2.0
"""A loop that generates tokens with a decoder that has its KV cache in OpenVINO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.engines.portable.greedy import greedy


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
