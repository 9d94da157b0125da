# SPDX-License-Identifier: Apache-2.0
"""Registration of sparse attention with `torch.library`, for compilers and tracers.

The ops `dynaxx::attention_forward` and `dynaxx::attention_backward` take the tensors of a layout, because a compiler
cannot handle a `BlockLayout`. An op costs about 0.1 ms per call more than the backend itself, so `sparse_attention`
calls the backend directly if nothing traces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dynaxx.kernels.registry import ATTENTION
from dynaxx.layout import BlockLayout, ElementMasks
from dynaxx.layout.derived import times_written
from dynaxx.layout.host_metadata import restore
from dynaxx.ops.checks import check_inputs
from dynaxx.ops.dispatch import score_options, with_bias
from dynaxx.patterns.base import Pattern

NO_PATTERN = -1  # where a call has a layout
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, dbias


def is_traced(*tensors: Tensor) -> bool:
    """Return whether something other than plain autograd intercepts ops: a compiler, tracer, mode, subclass or meta."""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return True
    return any([(type(x) is not Tensor and type(x) is not torch.nn.Parameter) or x.is_meta for x in tensors])


def layout_tensors(layout: BlockLayout, q: Tensor) -> list[Tensor]:
    """Return the tensors of a layout in the order `_layout_of` expects; fake if q is fake and no compiler runs."""
    tensors = list(layout.tensors)
    if not torch.compiler.is_compiling() and hasattr(q, "fake_mode"):
        return [q.fake_mode.from_tensor(tensor) for tensor in tensors]
    return tensors


@torch.library.custom_op("dynaxx::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: list[Tensor],
    q_block: int,
    kv_block: int,
    scale: float,
    softcap: float | None,
    backend: str,
    needs_grad: bool,
    bias: Tensor | None,
    bias_grad: bool,
    pattern: int,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, both contiguous. With `needs_grad`, "auto" chooses a backend that has a backward.

    With a `layout` without tensors, `pattern` is the number of the pattern whose layout is built when the op runs.
    """
    built = _built(layout, pattern, q, k, (q_block, kv_block))
    problem = check_inputs(q, k, v, built, softcap=softcap, needs_grad=needs_grad)
    name = ATTENTION.resolve(with_bias(problem, bias, bias_grad), backend)
    out, lse = ATTENTION.kernels(name).attention_forward(q, k, v, built, scale, **score_options(softcap, bias=bias))
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("dynaxx::attention_backward", mutates_args=())
def attention_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: list[Tensor],
    q_block: int,
    kv_block: int,
    scale: float,
    softcap: float | None,
    backend: str,
    bias: Tensor | None,
    bias_grad: bool,
    pattern: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk and dv with the strides of `torch.empty_like`, and dbias, which is empty if not asked for."""
    built = _built(layout, pattern, q, k, (q_block, kv_block))
    problem = check_inputs(q, k, v, built, softcap=softcap, needs_grad=True)
    name = ATTENTION.resolve(with_bias(problem, bias, bias_grad), backend)
    dbias = _empty_gradient(lse, bias, bias_grad).zero_()
    options = score_options(softcap, bias=bias, dbias=dbias if bias_grad else None)
    dq, dk, dv = ATTENTION.kernels(name).attention_backward(do, dlse, q, k, v, out, lse, built, scale, **options)
    return _in_memory_as(q, dq), _in_memory_as(k, dk), _in_memory_as(v, dv), dbias


def _empty_gradient(lse: Tensor, bias: Tensor | None, bias_grad: bool) -> Tensor:
    return lse.new_empty(bias.shape if bias is not None and bias_grad else 0)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of an attention forward, uninitialized: the shapes and dtypes that compilers need."""
    batch, seqlen_q, q_heads, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(batch, seqlen_q, q_heads, v.shape[3])
    return out, q.new_empty(batch, q_heads, seqlen_q, dtype=lse_dtype)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)


@attention_backward.register_fake
def _(do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any) -> Gradients:
    bias, bias_grad, _ = others[-3:]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _empty_gradient(lse, bias, bias_grad)


def _save_for_backward(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:  # type: ignore[type-arg]
    q, k, v, layout, *ctx.settings, _, bias, ctx.bias_grad, ctx.pattern = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(q, k, v, *output, bias, *layout)


def _backward(ctx: torch.autograd.function.FunctionCtx, do: Tensor, dlse: Tensor) -> tuple:  # type: ignore[type-arg]
    q, k, v, out, lse, bias, *layout = ctx.saved_tensors  # type: ignore[attr-defined]
    of_bias = ctx.bias_grad  # type: ignore[attr-defined]
    given = (do, dlse, q, k, v, out, lse, layout, *ctx.settings, bias, of_bias, ctx.pattern)  # type: ignore[attr-defined]
    dq, dk, dv, dbias = attention_backward(*given)
    return dq, dk, dv, [None] * len(layout), *(None,) * 6, dbias if of_bias else None, None, None


attention_forward.register_autograd(_backward, setup_context=_save_for_backward)


def _in_memory_as(x: Tensor, grad: Tensor) -> Tensor:
    wanted = torch.empty_like(x, device="meta").stride()
    return grad if grad.stride() == wanted else torch.empty_like(x).copy_(grad)


def pattern_attention(
    q: Tensor, k: Tensor, v: Tensor, number: int, block_size: int, scale: float, needs_grad: bool
) -> Tensor:
    """Attend over the pattern with this number, (batch, seqlen_q, q_heads, head_dim_v), in code that a compiler traces.

    A compiler cannot build a pattern's layout while it traces, and one graph serves every length. Numbers are valid in
    this process only, so exported programs must not contain them.
    """
    sizes = (block_size, block_size)
    return attention_forward(q, k, v, [], *sizes, scale, None, "auto", needs_grad, None, False, number)[0]


def number_of(pattern: Pattern) -> int:
    """Return the number of a pattern; assign the next free number to a new pattern."""
    if pattern not in _patterns:
        _patterns.append(pattern)
    return _patterns.index(pattern)


_patterns: list[Pattern] = []
_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _built(tensors: list[Tensor], pattern: int, q: Tensor, k: Tensor, block_size: tuple[int, int]) -> BlockLayout:
    """Return the layout of these tensors, or of a pattern if there are none."""
    if tensors:
        return _layout_of(tensors, q.shape[1], k.shape[1], block_size)
    return _patterns[pattern].layout(q.shape[1], k.shape[1], block_size=block_size, device=q.device)


def _layout_of(tensors: list[Tensor], seqlen_q: int, seqlen_k: int, block_size: tuple[int, int]) -> BlockLayout:
    """Return a layout of these tensors, including values that kernels cache with it.

    The layout is cached for as long as its first tensor lives, and rebuilt if a tensor was written to.
    """
    state = (seqlen_q, seqlen_k, block_size, *((x.data_ptr(), x.shape, times_written(x)) for x in tensors))
    found = _layouts.get(tensors[0])
    if found is None or found[0] != state:
        indptr, num_partial, indices, entry_masks, bits, bands = (x.detach() for x in tensors)  # no cycle with the key
        masks = ElementMasks(bits, bands, block_size[1])
        layout = BlockLayout(seqlen_q, seqlen_k, block_size, indptr, num_partial, indices, entry_masks, masks)
        restore(layout, tensors[0])
        found = _layouts[tensors[0]] = (state, layout)
    return found[1]
