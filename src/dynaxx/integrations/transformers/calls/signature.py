# SPDX-License-Identifier: Apache-2.0
"""`Signature`: everything that decides how an attention call runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, is_causal, sinks_of
from dynaxx.integrations.transformers.calls.dense_fallback import DenseAttention
from dynaxx.integrations.transformers.masks.lazy import LazyMask


class ScoreOptions(NamedTuple):
    """The options of an attention call that change its scores. `sinks_of` returns the tensor of learned sinks."""

    scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False
    window: int | None = None  # the layer's window, from the arguments
    unserved: DenseReason | None = None
    argument: str = ""  # the name of an unsupported argument

    @classmethod
    def of(cls, kwargs: dict[str, Any], dense: DenseAttention) -> ScoreOptions:
        """Read the keyword arguments of a call that may fall back to `dense`, which does not read all of them."""
        unserved, argument = None, ""
        for name in [name for name in kwargs if name in dense.reads]:  # torch 2.11 cannot trace `keys() &`
            if kwargs[name] is not None and kwargs[name] is not False:
                unserved, argument = DenseReason.ARGUMENT, name
        scale, softcap = kwargs.get("scaling"), kwargs.get("softcap")
        for name, value in (("scaling", scale), ("softcap", softcap)):
            if isinstance(value, Tensor) and value.requires_grad:  # the kernels return no gradient for it
                unserved, argument = DenseReason.ARGUMENT, name
        if kwargs.get("dropout"):
            unserved, argument = DenseReason.DROPOUT, ""
        if dense.returns_weights and kwargs.get("output_attentions"):
            unserved, argument = DenseReason.WEIGHTS, ""
        return cls(
            None if scale is None else float(scale),
            float(softcap) or None if softcap else None,
            sinks_of(kwargs) is not None,
            int(kwargs.get("sliding_window") or 0) or None,
            unserved,
            argument,
        )

    @property
    def need_eager(self) -> bool:
        """Return whether only the eager attention of transformers computes such scores."""
        return self.has_sinks or self.softcap is not None


class Signature(NamedTuple):
    """Everything that decides how an attention call runs, besides the values of its tensors.

    Each cache of a forward pass has a `Signature` as its key, and what it holds is made from the key (and the mask)
    alone. A new property of a call that matters is a new field here, and no cache can leave it out.
    """

    kind: int  # equal for layers with equal rules
    dense: DenseAttention  # the model's original attention of the layer, compared by identity
    mask: tuple[WeakIdRef, int] | None  # which mask, and how often it was written to
    q: torch.Size  # (B, Hq, Lq, D)
    k: torch.Size  # (B, Hk, Lk, D)
    v: torch.Size  # (B, Hk, Lk, E)
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None  # the dtype of autocast, if it is on
    causal: bool  # whether SDPA attends causally if it gets no mask
    group_size: int | None  # q heads per kv head of the whole layer, if the module says it
    scores: ScoreOptions

    @classmethod
    def of(cls, kind: int, dense: DenseAttention, call: AttentionCall) -> Signature:
        """Return the signature of a call of a layer of this kind."""
        module, q, k, v, mask, kwargs = call
        device = q.device
        identity = None if mask is None else (WeakIdRef(mask), 0 if mask.is_inference() else mask._version)
        autocasts = torch.is_autocast_enabled(device.type)
        return cls(
            kind,
            dense,
            identity,
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            device,
            torch.get_autocast_dtype(device.type) if autocasts else None,
            is_causal(call),
            getattr(module, "num_key_value_groups", None),
            ScoreOptions.of(kwargs, dense),
        )

    @property
    def batch(self) -> int:
        """Return the number of batch entries."""
        return self.q[0]

    @property
    def seqlen_q(self) -> int:
        """Return the number of queries of each batch entry."""
        return self.q[2]

    @property
    def seqlen_k(self) -> int:
        """Return the number of keys of each batch entry."""
        return self.k[2]

    def of_pattern(self) -> Signature:
        """Return the part on which the model's own pattern depends: equal for layers with other rules and scales."""
        return self._replace(kind=0, scores=self.scores._replace(scale=None))

    def tensors_reason(self, mask: Tensor | None) -> DenseReason | None:
        """Return why tensors of these shapes with a bool mask cannot be served, or None if they can."""
        if self.k[0] != self.batch or self.q[1] % self.k[1]:
            return DenseReason.SHAPES
        if mask is None:
            if not self.causal:
                return DenseReason.NOT_CAUSAL
            return DenseReason.MORE_QUERIES if self.seqlen_q > self.seqlen_k else None
        if isinstance(mask, LazyMask) and mask.rule.causal and not self.causal and not mask.plain_is_needed:
            return DenseReason.NOT_CAUSAL  # transformers drops this mask, and SDPA attends both ways (PaliGemma)
        if mask.dtype != torch.bool:
            return DenseReason.MASK_DTYPE
        if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, self.batch):
            return DenseReason.MASK_BY_HEAD
        return DenseReason.MASK_LENGTHS if mask.shape[2:] != (self.seqlen_q, self.seqlen_k) else None
