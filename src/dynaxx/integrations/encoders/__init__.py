# SPDX-License-Identifier: Apache-2.0
"""Run encoders with built-in sparse attention (Longformer, LED, BigBird) on dynaxx kernels."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.encoders.attach import EncoderHandle, Shared, apply_to_encoder, is_sparse_encoder

__all__ = ["EncoderHandle", "Shared", "apply_to_encoder", "is_sparse_encoder"]

__getattr__ = load_at_first_use(__name__, {"attach": __all__})
