# SPDX-License-Identifier: Apache-2.0
"""Convert xFormers' masks to layouts without importing xFormers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.xformers.masks import layout_of_mask

__all__ = ["layout_of_mask"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.xformers.masks as module

    return getattr(module, name)
