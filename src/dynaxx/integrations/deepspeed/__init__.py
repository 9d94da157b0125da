# SPDX-License-Identifier: Apache-2.0
"""Train under DeepSpeed: Ulysses splits a sequence over ranks, with a policy or the model's own pattern on each."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.deepspeed.ulysses import UlyssesHandle, apply_with_ulysses

__all__ = ["UlyssesHandle", "apply_with_ulysses"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.deepspeed.ulysses as module

    return getattr(module, name)
