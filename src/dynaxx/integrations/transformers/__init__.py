# SPDX-License-Identifier: Apache-2.0
"""Run policies in Hugging Face transformers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.apply_policy import (
        apply,
        attention_layers,
        full_attention_layers,
        model_facts,
    )

__all__ = ["apply", "attention_layers", "full_attention_layers", "model_facts"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.transformers.apply_policy as module

    return getattr(module, name)
