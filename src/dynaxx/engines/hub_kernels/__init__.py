# SPDX-License-Identifier: Apache-2.0
"""Lay out dynaxx's kernels as a package for Hugging Face's `kernels`."""

from dynaxx.engines.hub_kernels.package import write_kernel_package

__all__ = ["write_kernel_package"]
