# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions with the same names and arguments, on dynaxx's kernels."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.flash_attn.attention import flash_attn_func, flash_attn_varlen_func
    from dynaxx.integrations.flash_attn.kvcache import flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

__getattr__ = load_at_first_use(
    __name__,
    {
        "attention": ("flash_attn_func", "flash_attn_varlen_func"),
        "kvcache": ("flash_attn_with_kvcache",),
    },
)
