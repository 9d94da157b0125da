# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.vllm.plugin import WorkerExtension, register, status, switch

__all__ = ["WorkerExtension", "register", "status", "switch"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.vllm.plugin as module

    return getattr(module, name)
