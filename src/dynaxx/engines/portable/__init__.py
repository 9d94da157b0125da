# SPDX-License-Identifier: Apache-2.0
"""A model with a static policy as one module of plain tensor operations, for exporters to any engine."""

from dynaxx.engines.portable.model import PortableModel
from dynaxx.engines.portable.plans import portable_refusals

__all__ = ["PortableModel", "portable_refusals"]
