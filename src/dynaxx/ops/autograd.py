# SPDX-License-Identifier: Apache-2.0
"""`AttentionFunction`: gradients of `sparse_attention`, including grad, vjp and vmap of `torch.func`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import resolved
from dynaxx.derivatives import no_second_derivative, refuse_forward_mode, transforms_active
from dynaxx.kernels.registry import ATTENTION
from dynaxx.kernels.sinks import add_sinks, sink_gradient
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import never_traced
from dynaxx.ops.dispatch import backward_backend, score_options


class AttentionFunction(torch.autograd.Function):
    """Combine a backend's forward and backward. Gradients flow through `out` and through `lse`."""

    @staticmethod
    @never_traced
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        layout: BlockLayout,
        scale: float,
        softcap: float | None,
        name: str,
    ) -> Any:
        """Return (out, lse) from the backend `name`."""
        output = ATTENTION.kernels(name).attention_forward(
            q, k, v, layout, scale, **score_options(softcap, sinks, bias)
        )
        _save(ctx, (q, k, v, bias, layout, scale, softcap, name), output, sinks)
        return output

    @staticmethod
    @never_traced
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        """Return dq, dk, dv and the gradients of the sinks and of the bias."""
        saved = ctx.saved_tensors  # read once: under checkpointing, every read recomputes them
        dq, dk, dv, *others = _backward(ctx, saved, do, dlse, ctx.needs_input_grad[4])
        out, lse, _, sinks = saved[3:]
        dsinks = sink_gradient(do, dlse, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return dq, dk, dv, dsinks, *others


class MappableAttention(torch.autograd.Function):
    """`AttentionFunction` for `torch.func`. Its `apply` takes 60 us longer, because it binds arguments by signature."""

    @staticmethod
    @never_traced
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        layout: BlockLayout,
        scale: float,
        softcap: float | None,
        name: str,
    ) -> Any:
        """Return (out, lse) from the backend `name`."""
        return ATTENTION.kernels(name).attention_forward(q, k, v, layout, scale, **score_options(softcap, bias=bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the tensors and settings that backward reads."""
        _save(ctx, inputs, output, None)

    @staticmethod
    @never_traced
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        """Return dq, dk, dv and the gradient of the bias."""
        return _backward(ctx, ctx.saved_tensors, do, dlse, ctx.needs_input_grad[3])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Fold the mapped dimension into the batch."""
        return _as_batch(MappableAttention, 4, info.batch_size, in_dims, inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError("the kernels of dynaxx have no forward-mode derivatives")


def _save(ctx: Any, inputs: Any, output: Any, sinks: Tensor | None) -> None:
    """Save what backward reads, including the write counters of the layout."""
    q, k, v, bias, layout, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, bias, sinks)
    ctx.set_materialize_grads(False)  # pass None, not zeros, for an lse without a gradient
    ctx.layout, ctx.written = layout, layout.derived.versions


def _backward(ctx: Any, saved: Sequence[Any], do: Tensor | None, dlse: Tensor | None, of_bias: bool) -> Any:
    q, k, v, out, lse, bias, _ = saved
    if ctx.layout.derived.versions_now() != ctx.written:
        raise RuntimeError("`layout` was written to between forward and backward; write to a copy of it instead")
    do = torch.zeros_like(out) if do is None else resolved(do)
    dlse = resolved(dlse)
    gradients = _Gradients.apply if torch.is_grad_enabled() or transforms_active() else _Gradients.forward
    grads = gradients(do, dlse, q, k, v, out, lse, bias, ctx.layout, of_bias, *ctx.settings)
    return *grads, *(None,) * (8 - len(grads))


class _Gradients(torch.autograd.Function):
    """A backend's backward as an autograd function that vmap can map and that refuses second derivatives."""

    @staticmethod
    def forward(
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        layout: BlockLayout,
        of_bias: bool,
        scale: float,
        softcap: float | None,
        name: str,
    ) -> Any:
        dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format) if of_bias and bias is not None else None
        options = score_options(softcap, bias=bias, dbias=dbias)
        name = backward_backend(name, q, k, layout, softcap)
        grads = ATTENTION.kernels(name).attention_backward(do, dlse, q, k, v, out, lse, layout, scale, **options)
        return (*grads, dbias) if dbias is not None else tuple(grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing, because second derivatives are refused."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise no_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _as_batch(_Gradients, 8, info.batch_size, in_dims, inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_second_derivative()


def _as_batch(function: Any, count: int, size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
    """Call a function of (batch, ...) tensors, its first `count` inputs, with a batch that is `size` times as large.

    If the layout differs by batch entry, call the function once per mapped entry instead.
    """
    tensors, settings = inputs[:count], inputs[count:]
    layout: BlockLayout = settings[0]
    mapped = [None if x is None else _mapped_first(x, dim, size) for x, dim in zip(tensors, in_dims, strict=False)]
    if layout.layout_batch > 1:
        each = [function.apply(*(None if x is None else x[i] for x in mapped), *settings) for i in range(size)]
        found = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    else:
        whole = function.apply(*(None if x is None else x.flatten(0, 1) for x in mapped), *settings)
        found = tuple(x.unflatten(0, (size, -1)) for x in whole)
    return found, (0,) * len(found)


def _mapped_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def attend_with_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    layout: BlockLayout,
    scale: float,
    softcap: float | None,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Call the backend `name` with support for autograd and `torch.func`."""
    refuse_forward_mode(q, k, v)
    if not transforms_active():
        refuse_forward_mode(sinks, bias)
        return AttentionFunction.apply(q, k, v, sinks, bias, layout, scale, softcap, name)
    out, lse = MappableAttention.apply(q, k, v, bias, layout, scale, softcap, name)
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)
