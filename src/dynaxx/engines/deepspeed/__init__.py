# SPDX-License-Identifier: Apache-2.0
"""Train under DeepSpeed: Ulysses splits a sequence over ranks, with a policy or the model's own pattern on each."""

from dynaxx.engines.deepspeed.ulysses import UlyssesHandle, apply_with_ulysses

__all__ = ["UlyssesHandle", "apply_with_ulysses"]
