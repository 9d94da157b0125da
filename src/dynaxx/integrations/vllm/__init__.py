# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.vllm.plugin import WorkerExtension, register, status, switch

__all__ = ["WorkerExtension", "register", "status", "switch"]

__getattr__ = load_at_first_use(__name__, {"plugin": __all__})
