"""The old way: when a call must take it, and the attention that the model had."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.decoder import DENSE
from dynaxx.integrations.transformers.masks import Run

# Arguments of attention calls that do not change what is computed, or are handled here.
_HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    }
)


def dense_attention(module: nn.Module) -> Callable[..., tuple[Tensor, None]]:
    """The dense attention this module's own file would look up."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registry = getattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return registry[DENSE]


def argument_reason(kwargs: dict[str, Any]) -> str | None:
    """Why arguments beside the tensors make a call go the old way; None if they do not.

    Raises:
        UnsupportedInputError: arguments that the old way would drop without a word.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("sinks") is not None:
        raise UnsupportedInputError(
            "attention with learned sinks", {"transformers": ["`s_aux` has no equal here", "sdpa ignores it"]}
        )
    if kwargs.get("sliding_window"):
        return "layer has its own window"
    if kwargs.get("dropout"):
        return "attention dropout"
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _HARMLESS and name not in ("scaling", "dropout"):
            return f"argument {name}"
    return None


def dense_reason(module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> str | None:
    """Why a call must go the old way; None if it may be sparse.

    Raises:
        UnsupportedInputError: as `argument_reason`.
    """
    if (reason := argument_reason(kwargs)) is not None:
        return reason
    if k.shape[0] != q.shape[0] or q.shape[1] % k.shape[1]:
        return "q and k of other shapes"
    if mask is None:
        is_causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            return "not causal"
        return "more queries than keys" if q.shape[2] > k.shape[2] else None
    if mask.dtype != torch.bool:
        return "mask is not boolean"
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, q.shape[0]):
        return "mask differs by head"
    if mask.shape[2] != q.shape[2] or mask.shape[3] != k.shape[2]:
        return "mask of other lengths"
    return None


def dense_piece(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, run: Run) -> Tensor:
    """One run of a call, exactly as dense: (B, n, Hq, D)."""
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
