# SPDX-License-Identifier: Apache-2.0
"""A loop that generates tokens with a decoder that has its KV cache in OpenVINO."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from dynaxx.engines.portable.greedy import Array, Greedy, Step


class OpenVinoGenerator(Greedy):
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

    def step(self, input_ids: Array | Tensor) -> Array:
        """Run tokens (batch, seqlen) after those in the cache, and return the logits.

        A prompt may come in parts. The cache keeps the batch size of its first tokens until `reset`.
        """
        ids = np.ascontiguousarray(np.asarray(input_ids, dtype=np.int64))
        if ids.ndim != 2 or not ids.size:
            raise ValueError(f"`input_ids` must be (batch, seqlen) with one token or more, got {ids.shape}")
        return np.array(self._request.infer({"input_ids": ids})["logits"])

    def _start(self) -> Step:
        return OpenVinoGenerator(self._compiled).step
