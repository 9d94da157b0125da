# SPDX-License-Identifier: Apache-2.0
"""Attention processors whose attention function a policy replaces.

Each family has processors of its own, which project, normalise and rotate, and then call diffusers' attention dispatch
or torch's attention. A processor of ours has the class of its original as its base, and a copy of its `__call__` for
which the name of that one function means a stand-in. A compiler sees the opaque op `dynaxx::video_attention`, which
decides when the model runs.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.layout.host import never_traced

Dense = Callable[[], Tensor]


class Layer(Protocol):
    """An attention layer under a handle."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, dense: Dense) -> Tensor:
        """Return attention of (batch, seqlen, heads, head_dim), or what `dense` returns."""

    def attend_dense(self, reason: str, dense: Dense) -> Tensor:
        """Return what `dense` returns, and count the reason."""


class _Current(threading.local):
    """The number of the layer whose processor runs in this thread."""

    layer: Tensor | None = None


class _Traced:
    """The same while a compiler traces, which resolves it to the layer's tensor."""

    layer: Tensor | None = None


_CURRENT, _TRACED = _Current(), _Traced()
_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = count(1)


def sparse_processor(processor: Any, layer: Layer) -> Any:
    """Return a processor that does what `processor` does, but attends by `layer`.

    Raises:
        UnsupportedInputError: the processor calls neither diffusers' dispatch nor torch's attention by name.
    """
    number = next(_numbers)
    _LAYERS[number] = layer
    original: Any = type(processor)
    made: Any = object.__new__(_sparse_class(original))
    # A tensor, so that blocks of all layers share one compiled graph.
    made.__dict__.update(processor.__dict__, dynaxx_layer=torch.tensor(number, dtype=torch.int64, device="cpu"))
    return made


@functools.lru_cache(maxsize=64)
def _sparse_class(original: type[Any]) -> type[Any]:
    """Return a subclass of a processor's class that attends by the layer in `dynaxx_layer`."""
    inner = _with_stand_ins(original)

    @functools.wraps(original.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = _TRACED if torch.compiler.is_compiling() else _CURRENT
        current.layer = self.dynaxx_layer
        try:
            return inner(self, *args, **kwargs)
        finally:
            current.layer = None

    def as_original(self: Any, protocol: object) -> tuple[Any, ...]:
        """Copy and pickle as the original, without the layer, which belongs to one model in one process."""
        return object.__new__, (original,), {name: x for name, x in vars(self).items() if name != "dynaxx_layer"}

    return type(original.__name__, (original,), {"__call__": call, "__reduce_ex__": as_original})


def _with_stand_ins(original: type[Any]) -> Any:
    """Return a copy of a processor's `__call__` that calls stand-ins for the attention functions."""
    call: Any = original.__call__
    names = getattr(getattr(call, "__code__", None), "co_names", ())
    changed: dict[str, Any] = {}
    if "dispatch_attention_fn" in names:
        changed["dispatch_attention_fn"] = _stand_in(call.__globals__["dispatch_attention_fn"], 1)
    elif "scaled_dot_product_attention" in names and call.__globals__.get("F") is functional:
        own = _stand_in(functional.scaled_dot_product_attention, 2)
        changed["F"] = types.SimpleNamespace(**{**vars(functional), "scaled_dot_product_attention": own})
    else:
        raise UnsupportedInputError(original.__name__, {"diffusers": ["the processor calls no known attention"]})
    names_of = {name: value for name, value in {**call.__globals__, **changed}.items() if name != "__name__"}
    # Without `__name__`, by which a compiler would look the names up in diffusers' module.
    copy = types.FunctionType(call.__code__, names_of, call.__name__, call.__defaults__, call.__closure__)
    copy.__kwdefaults__ = call.__kwdefaults__
    return copy


@functools.lru_cache(maxsize=4)
def _stand_in(original: Callable[..., Tensor], tokens_at: int) -> Callable[..., Tensor]:
    """Return a function with the arguments of `original` that lets the current layer decide.

    Args:
        original: the attention function.
        tokens_at: the dimension of the tokens in its tensors of four dimensions; heads have the other of 1 and 2.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        common: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "scale": scale}
        given = {**common, **others, "is_causal": is_causal, "enable_gqa": enable_gqa}
        layer = _TRACED.layer
        if layer is None or torch.is_grad_enabled() or not torch.compiler.is_compiling() or _unserved(given):
            return _eager(original, tokens_at, query, key, value, given)
        q, k, v = (x if tokens_at == 1 else x.transpose(1, 2) for x in (query, key, value))
        out = video_attention(q, k, v, _mask(attn_mask, tokens_at), scale, layer)
        return out if tokens_at == 1 else out.transpose(1, 2)

    return attention


def _unserved(given: dict[str, Any]) -> bool:
    """Return whether a call has arguments besides a mask, a scale and a backend."""
    return any(
        value is not None and value is not False and value != 0.0
        for name, value in given.items()
        if name not in ("attn_mask", "scale", "backend")
    )


def _mask(mask: Tensor | None, tokens_at: int) -> Tensor | None:
    """Return a mask of four dimensions; diffusers also takes (batch, seqlen_k)."""
    return mask if mask is None or mask.ndim > 2 or tokens_at == 2 else mask[:, None, None]


@never_traced
def _eager(
    original: Callable[..., Tensor], tokens_at: int, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]
) -> Tensor:
    """Attend by the layer whose processor runs."""
    turned = lambda x: x if tokens_at == 1 else x.transpose(1, 2)
    dense = lambda: turned(original(query, key, value, **given))
    layer = _TRACED.layer if _CURRENT.layer is None else _CURRENT.layer
    assert layer is not None, "only processors of ours call a stand-in"
    own = _LAYERS[int(layer)]
    if _unserved(given):
        return turned(own.attend_dense(DenseReason.ARGUMENT, dense))
    out = own.attend(*map(turned, (query, key, value)), _mask(given["attn_mask"], tokens_at), given["scale"], dense)
    return turned(out)


@torch.library.custom_op("dynaxx::video_attention", mutates_args=())
def video_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, layer: Tensor) -> Tensor:
    """Attend by the layer with a number, all tensors (batch, seqlen, heads, head_dim). For inference."""

    def dense() -> Tensor:
        heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return functional.scaled_dot_product_attention(*heads_first, mask, scale=scale).transpose(1, 2)

    attended: Tensor = _LAYERS[int(layer)].attend(q, k, v, mask, scale, dense)
    return attended.contiguous()


@video_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, layer: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])
