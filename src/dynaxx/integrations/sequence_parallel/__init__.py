# SPDX-License-Identifier: Apache-2.0
"""Split the sequence of a transformers model over the ranks of a mesh."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.sequence_parallel.handle import SplitHandle

__all__ = ["SplitHandle"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.sequence_parallel.handle as module

    return getattr(module, name)
