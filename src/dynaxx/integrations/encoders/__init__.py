# SPDX-License-Identifier: Apache-2.0
"""Run encoders with built-in sparse attention (Longformer, LED, BigBird) on dynaxx kernels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.encoders.attach import EncoderHandle, Shared, apply_to_encoder, is_sparse_encoder

__all__ = ["EncoderHandle", "Shared", "apply_to_encoder", "is_sparse_encoder"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.encoders.attach as module

    return getattr(module, name)
