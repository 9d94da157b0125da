# SPDX-License-Identifier: Apache-2.0
"""Run encoders with built-in sparse attention (Longformer, LED, BigBird) on dynaxx kernels.

The files:

    attach                   what users call; replaces the attention modules of a model
    shared                   what the replaced modules of one model share
    longformer               the attention of Longformer and LED
    bigbird, bigbird_blocks  the attention of BigBird, and the random blocks that its seeds draw
"""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.encoders.attach import EncoderHandle, apply_to_encoder, is_sparse_encoder
    from dynaxx.integrations.encoders.shared import Shared

__all__ = ["EncoderHandle", "Shared", "apply_to_encoder", "is_sparse_encoder"]

__getattr__ = load_at_first_use(
    __name__, {"attach": ["EncoderHandle", "apply_to_encoder", "is_sparse_encoder"], "shared": ["Shared"]}
)
