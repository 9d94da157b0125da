# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions with the same names and arguments, on dynaxx's kernels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.flash_attn.attention import flash_attn_func, flash_attn_varlen_func
    from dynaxx.integrations.flash_attn.kvcache import flash_attn_with_kvcache

_SOURCE_OF = {
    "flash_attn_func": "dynaxx.integrations.flash_attn.attention",
    "flash_attn_varlen_func": "dynaxx.integrations.flash_attn.attention",
    "flash_attn_with_kvcache": "dynaxx.integrations.flash_attn.kvcache",
}

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def __getattr__(name: str) -> Any:
    if name not in _SOURCE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_SOURCE_OF[name]), name)
