"""Dense fallback: the attention that the model had, for whole calls and for single sequences of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import Tensor, nn

from dynaxx.integrations.transformers.decoder import DENSE
from dynaxx.integrations.transformers.masks import Run

Dense = Callable[..., tuple[Tensor, None]]


def dense_attention(module: nn.Module) -> Dense:
    """Return the dense attention that this module's own file would look up."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registry = getattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return registry[DENSE]


def dense_piece(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, run: Run) -> Tensor:
    """Attend densely in one run of a call: (B, n, Hq, D)."""
    if run.seqlen_k == 0:
        return q.new_zeros(q.shape[0], run.seqlen_q, q.shape[1], v.shape[-1])
    square = run.causal and run.seqlen_q == run.seqlen_k
    out = nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if square or not run.causal else mask,
        is_causal=square,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)
