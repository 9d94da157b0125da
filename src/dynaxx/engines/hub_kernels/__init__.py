# SPDX-License-Identifier: Apache-2.0
"""Lay out dynaxx's kernels as a package for Hugging Face's `kernels`."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.engines.hub_kernels.package import write_kernel_package

__all__ = ["write_kernel_package"]

__getattr__ = load_at_first_use(__name__, {"package": __all__})
