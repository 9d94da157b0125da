# SPDX-License-Identifier: Apache-2.0
"""Serve policies with Triton Inference Server, from a model repository for its Python backend."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.triton_server.repository import RepositorySettings, write_repository

__all__ = ["RepositorySettings", "write_repository"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.triton_server.repository as module

    return getattr(module, name)
