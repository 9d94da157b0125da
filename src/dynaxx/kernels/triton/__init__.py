"""The portable GPU backend, in Triton: every block size, head_dim, group and layout, forward and backward.

Triton itself loads with the first kernel, not with this package, so asking for reasons costs nothing on a CPU.
"""

from __future__ import annotations

import importlib
from typing import Any

from dynaxx.kernels.triton.support import unsupported_reasons

__all__ = ["attention_backward", "attention_forward", "unsupported_reasons"]

_SOURCES = {"attention_forward": "attention.forward", "attention_backward": "attention.backward"}


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_SOURCES[name]}"), name)
    globals()[name] = value
    return value
