"""The Hopper backend: blocks of 64 and 128, head_dim 64, 128 and 256, bf16 and fp16; by TMA and wgmma.

All are in Gluon but what a backward begins and ends with, in Triton. Both load with the first kernel, not with this
package.
"""

from __future__ import annotations

import importlib
from typing import Any

from dynaxx.kernels.hopper.support import unsupported_reasons

__all__ = ["attention_backward", "attention_forward", "unsupported_reasons"]

_SOURCES = {
    "attention_forward": "dynaxx.kernels.hopper.attention.forward",
    "attention_backward": "dynaxx.kernels.hopper.attention.backward",
}


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_SOURCES[name]), name)
    globals()[name] = value
    return value
