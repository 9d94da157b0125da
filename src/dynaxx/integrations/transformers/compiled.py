# SPDX-License-Identifier: Apache-2.0
"""One attention call of a compiled model, as an op that is opaque to the compiler.

`torch.compile` sees the op `dynaxx::layer_attention`, independent of lengths, policy and traffic. The model therefore
compiles once and without graph breaks. The op routes and runs the call when the model runs, as in eager mode.

    compiled graph:  q, k, v, mask or its parts, sinks --> dynaxx::layer_attention --> out
    when it runs:                                          Layer.attend: decide, then a rule, the model's own pattern,
                                                           or dense

A causal mask reaches the op as its parts, padding and offset (`masks/lazy.py`), so that no graph computes it. The op
makes a `LazyMask` of them, one per pass.

Decoding steps are traced into the model's original attention, because the cache's summaries live outside the graph.
Exported models are as well, because they leave the process, and so are short calls that would run dense in any case.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.derivatives import is_exporting
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.transformers.calls.arguments import SINKS, AttentionCall, sinks_of
from dynaxx.integrations.transformers.calls.dense_fallback import DenseAttention
from dynaxx.integrations.transformers.calls.layer import Layer
from dynaxx.integrations.transformers.calls.own_planning import UNSCORED, border
from dynaxx.integrations.transformers.calls.signature import ScoreOptions
from dynaxx.integrations.transformers.decoder import DENSE
from dynaxx.integrations.transformers.masks.lazy import CausalParts, lazy_mask, parts_of, plain_mask
from dynaxx.integrations.transformers.recordings import Recording, Recordings
from dynaxx.ops.checks import follow_autocast

ATTRIBUTE = "dynaxx_layer"  # of attention modules: their `TracedLayer`
MAX_TRACED = 4096  # keys; for more, SDPA is much faster in the op, which needs no mask, than with a traced mask
ANY_LENGTH = 1 << 62

RECORDINGS = Recordings()
ORIGINAL: dict[str, Callable[..., Any]] = {}  # the original attention by name, where all layers have the same function

_MODULES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()  # by layer number
_LAYERS: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()


class TracedLayer:
    """Traced code reads a layer from this attribute of its attention module, whose values compilers guard.

    Code that looks a layer up in a registry of all layers is compiled again when another model gets or loses a handle.

    Attributes:
        number: the number of the layer, 0 in a copy of the module, which has no handle.
        dense: the model's original attention.
        dense_below: calls with fewer queries and keys run dense by the policy, whatever their mask.
        own_pattern: whether they may still run the model's own pattern on dynaxx's kernels.
    """

    __slots__ = ("dense", "dense_below", "number", "own_pattern")

    def __init__(self, number: int, dense: DenseAttention) -> None:
        self.number, self.dense = number, dense
        self.dense_below, self.own_pattern = 0, True

    def __deepcopy__(self, memo: object) -> TracedLayer:
        """Return that of a module without a handle, which runs the original attention."""
        return TracedLayer(0, self.dense)

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        """Pickle as 0, which other processes know; there the attribute has no meaning."""
        return int, ()

    def know(self, deployed: Deployed, layer: int) -> None:
        """Store what a policy in force says about layer `layer`."""
        has_rule = layer in deployed.plans
        self.dense_below = deployed.policy.dense_below if has_rule else ANY_LENGTH
        if deployed.window is not None:
            self.dense_below = 0
        self.own_pattern = deployed.own_pattern

    def is_dense(self, q: Tensor, k: Tensor, scores: ScoreOptions) -> bool:
        """Return whether a call is so short that it is certain to run the model's original attention."""
        most = min(self.dense_below, MAX_TRACED)
        if self.own_pattern:
            most = 0 if scores.need_eager else min(most, border(q.device.type, *UNSCORED))
        return q.shape[2] < most and k.shape[2] < most

    def attend_dense(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Trace the model's original attention."""
        dense, need_eager = self.dense, ScoreOptions.of(kwargs, self.dense).need_eager
        found: tuple[Tensor, Tensor | None]
        if dense.name == DENSE and dense.window is None and not need_eager:  # one function for all layers: fewer guards
            found = ORIGINAL[DENSE](module, q, k, v, plain_mask(mask, DENSE, q.dtype), **kwargs)
        else:
            found = dense(module, q, k, v, mask, **kwargs)
        return found


def remember(layer: Layer, module: nn.Module) -> None:
    """Let traced code and `layer_attention` find a layer and its module."""
    _LAYERS[layer.number], _MODULES[layer.number] = layer, module
    setattr(module, ATTRIBUTE, TracedLayer(layer.number, layer.dense))
    if DENSE in layer.dense.by_name:
        ORIGINAL[DENSE] = layer.dense.by_name[DENSE]


def forget(module: nn.Module) -> None:
    """Undo `remember`, when the handle of a module is removed."""
    module.__dict__.pop(ATTRIBUTE, None)


def attend_compiled(
    layer: TracedLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """Trace one attention call of a layer, (B, Lq, Hq, D). Return None if the model's own attention must be traced.

    Args:
        layer: the layer.
        q: (B, Hq, Lq, D).
        k: (B, Hk, Lk, D).
        v: (B, Hk, Lk, D).
        mask: (B | 1, 1, Lq, Lk), or None.
        kwargs: the other arguments of the call from `AttentionInterface`.
    """
    scores = ScoreOptions.of(kwargs, layer.dense)
    if (
        not layer.number
        or is_exporting()
        or q.shape[2] == 1
        or scores.unserved is not None
        or layer.is_dense(q, k, scores)
    ):
        return None
    sinks = sinks_of(kwargs)
    window = kwargs.get("sliding_window")
    q, k, v = follow_autocast(q, k, v)
    options = (sinks, layer.number, scores.scale, scores.softcap, window or None, kwargs.get("is_causal"))
    parts = parts_of(mask)
    visible = (mask, None, None, None) if parts is None else (None, *parts)
    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    if torch.is_grad_enabled() and needs_grad:
        return recorded_layer_attention(q, k, v, *visible, *options)[0]
    return layer_attention(q, k, v, *visible, *options)


class _Call(NamedTuple):
    """The arguments of the ops. If there is an offset, the mask's `CausalParts` say what queries see, else the mask."""

    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hk, Lk, D)
    v: Tensor  # (B, Hk, Lk, D)
    mask: Tensor | None  # (B | 1, 1, Lq, Lk)
    padding: Tensor | None
    start: Tensor | None
    offset: int | None
    sinks: Tensor | None  # (Hq,)
    number: int  # of the layer in this process
    scale: float | None
    softcap: float | None
    window: int | None
    is_causal: bool | None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that have gradients."""
        return (self.q, self.k, self.v) if self.sinks is None else (self.q, self.k, self.v, self.sinks)


SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? padding, Tensor? start, SymInt? offset, Tensor? sinks, "
    "SymInt number, float? scale, float? softcap, SymInt? window, bool? is_causal"
)  # of `_Call`
_op = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))


@_op("dynaxx::layer_attention", schema=f"({SCHEMA}) -> Tensor")
def layer_attention(*arguments: Any) -> Tensor:
    """Run one attention call, given the fields of `_Call`: (B, Lq, Hq, D), contiguous."""
    with torch.no_grad():
        return _attend(_Call(*arguments)).contiguous()


@_op("dynaxx::recorded_layer_attention", schema=f"({SCHEMA}) -> (Tensor, Tensor)")
def recorded_layer_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run `layer_attention` for training. Return its result and the ticket of a recording for the backward op."""
    call = _Call(*arguments)
    out, recording = _record(call)
    return out, RECORDINGS.keep(recording, call.q.device)


@_op(
    "dynaxx::layer_attention_backward",
    schema=f"(Tensor do, Tensor out, Tensor ticket, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def layer_attention_backward(
    do: Tensor, out: Tensor, ticket: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and dsinks (empty without sinks). Records the call again if there is no recording of it."""
    call, recording = _Call(*arguments), RECORDINGS.take(ticket)
    if recording is None:
        out, recording = _record(call, backward=True)
    grads = recording.gradients(do, (*call.inputs, call.mask, out))
    found = [
        torch.zeros_like(x) if g is None else torch.empty_like(x).copy_(g)
        for x, g in zip(call.inputs, grads, strict=True)
    ]
    return found[0], found[1], found[2], found[3] if call.sinks is not None else do.new_empty(0)


def _record(call: _Call, *, backward: bool = False) -> tuple[Tensor, Recording]:
    """Attend with gradients of the call's inputs."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return _attend(call._replace(q=q, k=k, v=v, sinks=sinks), backward=backward)

    return Recording.of(attend, call.inputs, (call.mask,))


def _attend(call: _Call, *, backward: bool = False) -> Tensor:
    layer, module, q, k = _LAYERS.get(call.number), _MODULES.get(call.number), call.q, call.k
    if layer is None or module is None:
        raise RuntimeError(
            "the model was compiled with a dynaxx handle that has been removed; call torch.compiler.reset() and "
            "compile it again"
        )
    options = {"scaling": call.scale, "softcap": call.softcap, "sliding_window": call.window}
    kwargs: dict[str, Any] = {**options, "is_causal": call.is_causal, SINKS[0]: call.sinks}
    given = {name: value for name, value in kwargs.items() if value is not None}
    current, mask = layer.current_pass(backward=backward), call.mask
    if call.offset is not None:
        parts = CausalParts(call.padding, call.start, call.offset)
        mask = lazy_mask(parts, q, k.shape[2]) if current is None else current.lazy_mask(parts, q, k.shape[2])
    return layer.attend(current, AttentionCall(module, q, k, call.v, mask, given))[0]


@layer_attention.register_fake
def _(*arguments: Any) -> Tensor:
    return _empty_result(_Call(*arguments))


@recorded_layer_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*arguments)
    return _empty_result(call), call.q.new_empty(1, dtype=torch.uint8)


def _empty_result(call: _Call) -> Tensor:
    q = call.q
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], call.v.shape[3])


@layer_attention_backward.register_fake
def _(do: Tensor, out: Tensor, ticket: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, *sinks = map(torch.empty_like, _Call(*arguments).inputs)
    return q, k, v, sinks[0] if sinks else q.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, padding, start, ctx.offset, sinks, *ctx.settings = inputs
    ctx.save_for_backward(*output, q, k, v, mask, padding, start, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, do: Tensor, _: Any) -> tuple[Any, ...]:
    out, ticket, q, k, v, mask, padding, start, sinks = ctx.saved_tensors
    given = (q, k, v, mask, padding, start, ctx.offset, sinks)
    dq, dk, dv, dsinks = layer_attention_backward(do, out, ticket, *given, *ctx.settings)
    return dq, dk, dv, None, None, None, None, None if sinks is None else dsinks, None, None, None, None, None


recorded_layer_attention.register_autograd(_backward, setup_context=_save_for_backward)
