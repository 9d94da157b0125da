# SPDX-License-Identifier: Apache-2.0
"""A model with a static policy as one module of plain tensor operations, for exporters to any engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.portable.model import PortableModel
    from dynaxx.integrations.portable.plans import portable_refusals

__all__ = ["PortableModel", "portable_refusals"]


def __getattr__(name: str) -> Any:
    if name == "PortableModel":
        from dynaxx.integrations.portable.model import PortableModel

        return PortableModel
    if name == "portable_refusals":
        from dynaxx.integrations.portable.plans import portable_refusals

        return portable_refusals
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
