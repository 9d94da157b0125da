# SPDX-License-Identifier: Apache-2.0
"""`LazyMask`: the mask of a forward pass, described by its rule and computed only if it is read.

Block-sparse attention does not need a seqlen x seqlen mask, which takes a gigabyte at 32,768 tokens. transformers calls
the function of `mask_maker` for the masks of models that run on dynaxx. If the mask has a rule, the function returns a
tensor of the right shape without data. Any operation on this tensor computes the mask, so other code needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dynaxx.derivatives import is_exporting
from dynaxx.integrations.transformers.decoder import before_of
from dynaxx.integrations.transformers.masks.rules import MaskRule, read_rule

ATTRIBUTE = "dynaxx_parts"


class CausalParts(NamedTuple):
    """The parts of a causal mask: queries see the keys up to their own that are not padding."""

    padding: Tensor | None  # (batch, seqlen_k or fewer) bool, False for padding; None without padding
    start: Tensor | None  # the column of the first query's own key, if only the device knows it: (), int64
    offset: int  # the same if the host knows it, otherwise 0


def traced_mask(mask: Tensor | None, request: dict[str, Any], *, causal: bool) -> Tensor | None:
    """Return a mask that is made once, or one with parts if the mask function of the request is the causal one.

    Args:
        mask: the mask that transformers made; None without one.
        request: the arguments of the call of `AttentionMaskInterface`.
        causal: whether its mask function is that of causal masks.
    """
    if mask is None or request["q_length"] == 1:
        return mask
    if not causal or request.get("use_vmap") or request.get("kv_offset", 0) != 0:
        return made_once(mask)
    padding, start = request.get("attention_mask"), request.get("q_offset", 0)
    padding = None if padding is None else made_once(padding)
    parts = (
        CausalParts(padding, made_once(start), 0) if isinstance(start, Tensor) else CausalParts(padding, None, start)
    )
    setattr(mask, ATTRIBUTE, parts)
    return mask


@torch.library.custom_op("dynaxx::made_once", mutates_args=())
def made_once(x: Tensor) -> Tensor:
    """Return a contiguous copy, which the compiler cannot compute again in another place."""
    return x.clone(memory_format=torch.contiguous_format)


@made_once.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def parts_of(mask: Tensor | None) -> CausalParts | None:
    """Return the parts of a traced mask, or None if it has none."""
    return None if mask is None else getattr(mask, ATTRIBUTE, None)


class LazyMask(Tensor):
    """A bool mask (batch, 1, seqlen_q, seqlen_k) that is computed when it is read.

    Attributes:
        rule: the keys that a query sees, without padding.
        request: the arguments of the call that requested the mask.
    """

    rule: MaskRule
    request: dict[str, Any]
    _offset: int | None
    _made: dict[tuple[str, torch.dtype | None], Tensor | None]
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, rule: MaskRule, request: dict[str, Any]) -> LazyMask:
        """Return the lazy mask for a request."""
        shape = (request["batch_size"], 1, request["q_length"], request["kv_length"])
        device = torch.device(request.get("device", "cpu"))
        mask: LazyMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        start = request.get("q_offset", 0)
        if isinstance(start, Tensor):  # a static cache updates its counter in place
            request = {**request, "q_offset": start.clone()}
        mask.rule, mask.request, mask._made, mask._offset = rule, request, {}, None
        return mask

    @property
    def offset(self) -> int:
        """The column of the first query's own key. For a static cache it is read back from the device once."""
        if self._offset is None:
            self._offset = int(self.request.get("q_offset", 0)) - int(self.request.get("kv_offset", 0))
        return self._offset

    @property
    def padding(self) -> Tensor | None:
        """Return (batch, seqlen_k) bool, True for tokens and False for padding, or None without padding."""
        given = self.request.get("attention_mask")
        if given is None:
            return None
        start, count = int(self.request.get("kv_offset", 0)), self.shape[3]
        part = given[:, start : start + count].to(torch.bool)
        return torch.nn.functional.pad(part, (0, count - part.shape[1])) if part.shape[1] < count else part

    @property
    def is_local(self) -> bool:
        """Return whether a window or chunks hide keys from some query."""
        seqlen = self.offset + self.shape[2]
        return any(size is not None and size < seqlen for size in (self.rule.window, self.rule.chunk))

    @property
    def plain_is_needed(self) -> bool:
        """Return whether SDPA needs a mask: windows, chunks, documents, blocks, padding, queries after cached keys."""
        if self.is_local or self.rule.documents is not None or self.rule.blocks is not None:
            return True
        if self.rule.causal and self.offset > 0:
            return True
        padding = self.padding
        return padding is not None and not bool(padding[:, : self.offset + self.shape[2]].all())

    def plain(self, implementation: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the mask that transformers would compute for an attention implementation. Computed once.

        Args:
            implementation: "sdpa", with a bool mask, or None if SDPA needs none; or "eager", with an additive mask.
            dtype: dtype of the scores, for "eager".
        """
        key = (implementation, dtype)
        if key not in self._made:
            from transformers import AttentionMaskInterface

            request = self.request if dtype is None else {**self.request, "dtype": dtype}
            self._made[key] = AttentionMaskInterface()[implementation](**request)
        return self._made[key]

    def tensor(self) -> Tensor:
        """Return the mask as a plain bool tensor."""
        from transformers.masking_utils import sdpa_mask

        key = ("tensor", None)
        if key not in self._made:
            whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._made[key] = sdpa_mask(**{**self.request, **whole})
        found = self._made[key]
        assert found is not None, "a whole mask was requested"
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute the mask, and run the operation on it. Reentrant checkpointing detaches masks, which stay lazy."""
        if function is torch.ops.aten.detach.default:
            mask = cls.of(args[0].rule, args[0].request)
            mask._made = args[0]._made
            return mask
        made = lambda x: x.tensor() if isinstance(x, LazyMask) else x
        return function(*tree_map(made, args), **tree_map(made, dict(kwargs or {})))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the shape and the rule, without computing the mask."""
        return f"LazyMask(shape={tuple(self.shape)}, {self.rule})"


@cache
def mask_maker() -> Callable[..., Tensor | None]:
    """Return the function that makes the masks of models on dynaxx, with the signature of `AttentionMaskInterface`.

    Decoding steps, mask functions without a rule, and compiled models get SDPA's mask; a causal one of a compiled model
    carries its parts. Exported and traced models get the mask of their original attention. The function imports
    nothing, because torch.compile traces it, and an import breaks the graph under torch 2.11.
    """
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

    is_known = read_rule(causal_mask_function) is not None

    def make_mask(**request: Any) -> Tensor | None:
        if torch.compiler.is_compiling() and not is_exporting():  # `plain_mask` converts it
            causal = is_known and request.get("mask_function", causal_mask_function) is causal_mask_function
            return traced_mask(sdpa_mask(**request), request, causal=causal)
        if is_exporting() or torch._C._get_tracing_state() is not None:
            config = request.get("config")
            return AttentionMaskInterface()["sdpa" if config is None else before_of(config)](**request)
        if request["q_length"] == 1:
            return sdpa_mask(**request)
        rule = read_rule(request.get("mask_function", causal_mask_function))
        return sdpa_mask(**request) if rule is None else LazyMask.of(rule, request)

    return make_mask


def lazy_mask(parts: CausalParts, q: Tensor, seqlen_k: int) -> LazyMask:
    """Return the causal mask of q (B, Hq, Lq, D) and `seqlen_k` keys from its parts in a compiled graph."""
    from transformers.masking_utils import causal_mask_function

    request = {
        "batch_size": q.shape[0],
        "q_length": q.shape[2],
        "kv_length": seqlen_k,
        "q_offset": parts.offset if parts.start is None else parts.start,
        "kv_offset": 0,
        "mask_function": causal_mask_function,
        "attention_mask": parts.padding,
        "device": q.device,
    }
    return LazyMask.of(MaskRule(causal=True), request)


def has_own_pattern(mask: Tensor | None) -> bool:
    """Return whether the mask belongs to a layer with a window or chunks, at any length."""
    return isinstance(mask, LazyMask) and (mask.rule.window is not None or mask.rule.chunk is not None)


def plain_mask(mask: Tensor | None, implementation: str, dtype: torch.dtype) -> Tensor | None:
    """Return a mask (B | 1, 1, Lq, Lk) in the form of an implementation: bool for SDPA, numbers to add for "eager"."""
    added = implementation == "eager"
    if isinstance(mask, LazyMask):
        return mask.plain(implementation, dtype if added else None)
    if added and mask is not None and mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask
