# SPDX-License-Identifier: Apache-2.0
"""Run policies in Hugging Face transformers. docs/internals/calls.md follows a call through these files.

The files:

    apply_policy, handle       what users call
    loading                    loads from folders without running their code
    decoder                    reads a model: its config, its layers, and why it cannot be served
    hooks, passes              start and end a forward pass
    forward_context            what the calls of a pass share
    calls/                     one attention call: planned, then run by a rule, by the model's own pattern, or dense
    masks/                     which sequences a mask shows
    repeats                    calls that equal layers of a pass make without planning
    next_token                 compares requests with the dense model, for the guard
    compiled, recordings       models under `torch.compile`, and what their training keeps
    batching, batches/         continuous batching
    llama, *_llama             Llamas whose attention was converted

Unless a docstring says otherwise, tensors have transformers' order: q (B, Hq, Lq, D), k (B, Hk, Lk, D), v
(B, Hk, Lk, E), masks (B | 1, 1, Lq, Lk), results (B, Lq, Hq, E). dynaxx's own functions take tokens before heads,
(B, L, H, D), so these files transpose before they call them.
"""

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
