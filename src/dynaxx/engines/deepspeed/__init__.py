# SPDX-License-Identifier: Apache-2.0
"""Train under DeepSpeed: Ulysses splits a sequence over ranks, with a policy or the model's own pattern on each."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.engines.deepspeed.ulysses import UlyssesHandle, apply_with_ulysses

__all__ = ["UlyssesHandle", "apply_with_ulysses"]

__getattr__ = load_at_first_use(__name__, {"ulysses": __all__})
