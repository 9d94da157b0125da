# SPDX-License-Identifier: Apache-2.0
"""A model with a static policy as one module of plain tensor operations, for exporters to any engine."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.engines.portable.model import PortableModel
    from dynaxx.engines.portable.plans import portable_refusals

__all__ = ["PortableModel", "portable_refusals"]

__getattr__ = load_at_first_use(__name__, {"model": ("PortableModel",), "plans": ("portable_refusals",)})
