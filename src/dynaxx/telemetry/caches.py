# SPDX-License-Identifier: Apache-2.0
"""Measure the memory of key-value caches, only when somebody reads the numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from dynaxx.telemetry.recorder import Recorder


class CacheMeter:
    """Sets `dynaxx_kv_cache_bytes` to the memory of the live caches whenever numbers are read, as long as it lives.

    Args:
        caches: a method that gives them, held weakly.
    """

    def __init__(self, numbers: Recorder, caches: Callable[[], Iterable[Any]]) -> None:
        self._numbers = numbers
        self._caches = weakref.WeakMethod(caches)
        numbers.add_source(self)

    def flush(self) -> None:
        """Measure the caches now."""
        caches = self._caches()
        if caches is None:
            return
        try:
            self._numbers.set("dynaxx_kv_cache_bytes", sum(map(cache_bytes, caches())))
        except RuntimeError:  # a request began or ended while we looked: the next look will do
            return


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a transformers cache: the keys and values of the layers that are filled."""
    tensors = (getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values"))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))
