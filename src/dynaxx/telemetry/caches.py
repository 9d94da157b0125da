# SPDX-License-Identifier: Apache-2.0
"""Measure the memory of key-value caches whenever the metrics are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from dynaxx.telemetry.recorder import Recorder


class CacheMeter:
    """Set `dynaxx_kv_cache_bytes` to the memory of the live caches whenever metrics are read, until it is collected.

    Args:
        numbers: the recorder to write to.
        caches: a method that returns the caches; it is referenced weakly.
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
        except RuntimeError:  # a request started or ended meanwhile; the next reading counts it
            return


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the keys and values in the filled layers of a transformers cache."""
    tensors = (getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values"))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))
