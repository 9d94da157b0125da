# SPDX-License-Identifier: Apache-2.0
"""Run policies in Hugging Face transformers."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.apply_policy import (
        apply,
        attention_layers,
        full_attention_layers,
        model_facts,
    )

__all__ = ["apply", "attention_layers", "full_attention_layers", "model_facts"]

__getattr__ = load_at_first_use(__name__, {"apply_policy": __all__})
