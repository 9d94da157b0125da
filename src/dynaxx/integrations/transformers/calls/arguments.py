# SPDX-License-Identifier: Apache-2.0
"""`AttentionCall` and its options: those that change the scores, those without effect, and unsupported ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.runtime.routing import DenseReason

SINKS = ("s_aux", "sinks")  # the names of learned sinks

# Arguments that do not change the result, or that are handled elsewhere.
HARMLESS = frozenset(
    {
        "assistant_tokenizer",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "scaling",
        "seq_idx",
        "shift_labels",
        "tokenizer",  # `generate(tokenizer=...)` hands it down, as transformers' server does
        "use_cache",
    }
)


class AttentionCall(NamedTuple):
    """An attention call as transformers makes it; see `AttentionInterface`."""

    module: nn.Module
    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hk, Lk, D)
    v: Tensor  # (B, Hk, Lk, E)
    mask: Tensor | None  # (B | 1, 1, Lq, Lk), or None for a plain causal call
    kwargs: dict[str, Any]

    @property
    def seqlen_q(self) -> int:
        """Return the number of queries of each batch entry."""
        return self.q.shape[2]

    @property
    def seqlen_k(self) -> int:
        """Return the number of keys of each batch entry."""
        return self.k.shape[2]

    @property
    def causal_without_mask(self) -> bool:
        """Return whether SDPA attends causally if it gets no mask."""
        given = self.kwargs.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if given is None else given)


class ScoreOptions(NamedTuple):
    """The options of an attention call that change its scores. `sinks_of` returns the tensor of learned sinks."""

    scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False
    window: int | None = None  # the layer's window, from the arguments
    unserved: DenseReason | None = None
    argument: str = ""  # the name of an unsupported argument

    @classmethod
    def of(cls, kwargs: dict[str, Any]) -> ScoreOptions:
        """Read the keyword arguments of a call."""
        softcap, has_sinks, window, unserved, argument = None, False, None, None, ""
        for name, value in kwargs.items():
            if value is None or value is False or name in HARMLESS:
                continue
            if name in SINKS:
                has_sinks = True
            elif name == "softcap":
                softcap = float(value) or None
            elif name == "sliding_window":
                window = int(value) or None
            elif name == "dropout":
                unserved = DenseReason.DROPOUT if value else unserved
            else:
                unserved, argument = unserved or DenseReason.ARGUMENT, name
        scale = kwargs.get("scaling")
        return cls(None if scale is None else float(scale), softcap, has_sinks, window, unserved, argument)

    @property
    def need_eager(self) -> bool:
        """Return whether only the eager attention of transformers computes such scores."""
        return self.has_sinks or self.softcap is not None


def sinks_of(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the learned sinks of a call, (q_heads,), or None."""
    found: Tensor | None = kwargs.get(SINKS[0])
    return kwargs.get(SINKS[1]) if found is None else found


def tensors_reason(call: AttentionCall) -> DenseReason | None:
    """Return why the tensors of a call cannot be served, or None if they can."""
    q, k, mask = call.q, call.k, call.mask
    if k.shape[0] != q.shape[0] or q.shape[1] % k.shape[1]:
        return DenseReason.SHAPES
    if mask is None:
        if not call.causal_without_mask:
            return DenseReason.NOT_CAUSAL
        return DenseReason.MORE_QUERIES if q.shape[2] > k.shape[2] else None
    if mask.dtype != torch.bool:
        return DenseReason.MASK_DTYPE
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, q.shape[0]):
        return DenseReason.MASK_BY_HEAD
    return DenseReason.MASK_LENGTHS if mask.shape[2] != q.shape[2] or mask.shape[3] != k.shape[2] else None
