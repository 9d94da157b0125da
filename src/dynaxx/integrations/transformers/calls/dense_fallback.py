# SPDX-License-Identifier: Apache-2.0
"""Dense fallback: the model's original attention, for whole calls and for single sequences of a call."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.transformers.calls.arguments import SINKS, AttentionCall, is_causal, sinks_of
from dynaxx.integrations.transformers.calls.own_pattern import Window, causal_layout
from dynaxx.integrations.transformers.masks.lazy import has_own_pattern, plain_mask
from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.ops import sparse_attention

Attention = Callable[..., Any]

# Keyword arguments that `ScoreOptions` reads, so that dynaxx serves them or refuses them by a reason of their own.
READ = {"scaling", "dropout", "softcap", "sliding_window", "is_causal", "output_attentions", *SINKS}
TENSORS = {"module", "query", "key", "value", "attention_mask"}


class PlainMask(NamedTuple):
    """The original attention of a call and the mask that it expects."""

    name: str  # "sdpa" or "eager"
    mask: Tensor | None


class DenseAttention:
    """The original attention of a module, called with the mask that it expects.

    SDPA serves neither softcap nor sinks. Calls with these arguments use the eager attention of the module's file.

    Args:
        module: an attention module of transformers.
        implementation: the name of the model's original attention, "sdpa" or "eager".
        window: the keys on each side that `apply(window=...)` leaves visible; None for all.

    Attributes:
        reads: the other keyword arguments that the original attention reads; it ignores all that are not among them.
    """

    __slots__ = ("by_name", "name", "reads", "window")

    def __init__(self, module: nn.Module, implementation: str, window: Window | None = None) -> None:
        self.name, self.window = implementation, window
        self.by_name = {name: attention_of(module, name) for name in {"eager", implementation}}
        self.reads = frozenset[str]().union(*map(names_read, self.by_name.values())) - READ

    def __deepcopy__(self, memo: object) -> DenseAttention:
        """Return the same object, which is never changed."""
        return self

    @property
    def returns_weights(self) -> bool:
        """Return whether it returns attention weights."""
        return self.name == "eager"

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the signature of `AttentionInterface`."""
        call, need_eager = AttentionCall(module, q, k, v, mask, kwargs), bool(kwargs.get("softcap"))
        plain = self.plain(call, causal=is_causal(call), need_eager=need_eager or sinks_of(kwargs) is not None)
        found: tuple[Tensor, Tensor | None] = self.by_name[plain.name](module, q, k, v, plain.mask, **kwargs)
        return found

    def plain(self, call: AttentionCall, *, causal: bool, need_eager: bool) -> PlainMask:
        """Return the attention for a call, and its mask in the form that it expects. Equal calls share both."""
        name, mask, q = "eager" if need_eager else self.name, call.mask, call.q
        found = plain_mask(mask, name, q.dtype)
        window = self.window_for(mask, q.shape[2], call.k.shape[2])
        if window is not None:
            right = 0 if causal and mask is None and name != "eager" else window[1]
            found = _narrowed(found, (window[0], right), q, added=name == "eager")
        return PlainMask(name, found)

    def window_for(self, mask: Tensor | None, seqlen_q: int, seqlen_k: int) -> Window | None:
        """Return the window if it hides any key of a call. It never changes a pattern of the layer's own."""
        if self.window is None or seqlen_q != seqlen_k or has_own_pattern(mask):
            return None
        return None if not is_traced() and seqlen_q <= min(self.window) + 1 else self.window


def is_traced() -> bool:
    """Return whether a tracer runs, so that lengths may differ when the code runs."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _narrowed(mask: Tensor | None, window: Window, q: Tensor, *, added: bool) -> Tensor:
    """Return a mask (B | 1, H | 1, L, L) that also hides the keys outside a window, None for one that shows all."""
    at = torch.arange(q.shape[2], device=q.device)
    apart = at[None] - at[:, None]  # key - query
    shown = (apart >= -window[0]) & (apart <= window[1])
    if mask is not None and mask.dtype == torch.bool:
        return mask & shown
    if mask is None and not added:
        return shown[None, None]
    mask = torch.zeros(1, 1, *apart.shape, dtype=q.dtype, device=q.device) if mask is None else mask
    return mask.masked_fill(~shown, torch.finfo(mask.dtype).min)


@cache
def names_read(function: Attention) -> frozenset[str]:
    """Return the names of the keyword arguments that an attention function may read.

    They are its parameters, and the strings in its code, one of which it must use to look a name up in its `**kwargs`.
    A function that hands its `**kwargs` on, or has no code, may also read what that of SDPA reads.
    """
    parameters = inspect.signature(function).parameters.values()
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - TENSORS
    rest = [each.name for each in parameters if each.kind is each.VAR_KEYWORD]
    if code is not None:
        names |= {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    if rest and (code is None or _hands_on(list(dis.get_instructions(code)), rest[0])):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        names |= names_read(sdpa_attention_forward) if function is not sdpa_attention_forward else set()
    return frozenset(names)


def _hands_on(code: list[dis.Instruction], rest: str) -> bool:
    """Return whether code passes its `**kwargs` on as keyword arguments: loads them, then merges them into a call's."""
    loads = lambda each: (
        each.opname.startswith("LOAD") and rest in (each.argval if isinstance(each.argval, tuple) else (each.argval,))
    )
    merges = ("DICT_MERGE", "CALL_FUNCTION_EX")
    return any(loads(one) and other.opname in merges for one, other in pairwise(code))


def attention_of(module: nn.Module, name: str) -> Attention:
    """Return the attention of a module by its name; "eager" is a function of the module's file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    file = sys.modules.get(type(module).__module__)
    registry = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    if name != "eager":
        found: Attention = registry[name]
        return found
    return getattr(file, "eager_attention_forward", None) or registry["sdpa"]


def dense_piece(
    q: Tensor, k: Tensor, v: Tensor, run: MaskRun, *, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend densely for one run of a call: (B, heads, n, D) -> (B, n, Hq, D)."""
    if run.seqlen_k == 0:
        return q.new_zeros(q.shape[0], run.seqlen_q, q.shape[1], v.shape[-1])
    square = run.causal and run.seqlen_q == run.seqlen_k
    if softcap is None and sinks is None and (square or not run.causal):
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=square, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)
    layout = causal_layout(run.seqlen_q, run.seqlen_k, q.device, causal=run.causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sparse_attention(q, k, v, layout, scale=scale, softcap=softcap, sinks=sinks)
