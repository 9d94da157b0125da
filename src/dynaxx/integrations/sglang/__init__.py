# SPDX-License-Identifier: Apache-2.0
"""The SGLang plugin, written to the interface of SGLang 0.5.23 and tested with stand-ins, never with SGLang itself."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.sglang.plugin import register, status, switch

__all__ = ["register", "status", "switch"]

__getattr__ = load_at_first_use(__name__, {"plugin": __all__})
