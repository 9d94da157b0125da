# SPDX-License-Identifier: Apache-2.0
"""Lay out dynaxx's kernels as a package for Hugging Face's `kernels`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.hub_kernels.package import write_kernel_package

__all__ = ["write_kernel_package"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.hub_kernels.package as module

    return getattr(module, name)
