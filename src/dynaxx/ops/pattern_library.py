# SPDX-License-Identifier: Apache-2.0
"""`dynaxx::pattern_attention` for `torch.library`: attention over a pattern, whose layout is built when the op runs.

A compiler cannot build a pattern's layout while it traces. This op takes the pattern as a number instead, so one graph
serves every length. The numbers are valid only in this process, so exported programs must not contain them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout
from dynaxx.ops.checks import check_inputs
from dynaxx.ops.dispatch import choose_backend, load_backend
from dynaxx.ops.library import empty_results
from dynaxx.patterns.base import Pattern

_patterns: list[Pattern] = []


def number_of(pattern: Pattern) -> int:
    """Return the number of a pattern; assign the next free number to a new pattern."""
    if pattern not in _patterns:
        _patterns.append(pattern)
    return _patterns.index(pattern)


@torch.library.custom_op("dynaxx::pattern_attention", mutates_args=())
def pattern_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: int, block_size: int, scale: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return out (batch, seqlen_q, q_heads, head_dim_v) and lse (batch, q_heads, seqlen_q), both contiguous."""
    layout = _layout(q, k, pattern, block_size)
    name = choose_backend(check_inputs(q, k, v, layout, needs_grad=needs_grad), "auto")
    out, lse = load_backend(name).attention_forward(q, k, v, layout, scale)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("dynaxx::pattern_attention_backward", mutates_args=())
def pattern_attention_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: int,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, contiguous."""
    layout = _layout(q, k, pattern, block_size)
    name = choose_backend(check_inputs(q, k, v, layout, needs_grad=True), "auto")
    grads = load_backend(name).attention_backward(do, dlse, q, k, v, out, lse, layout, scale)
    dq, dk, dv = (grad.contiguous() for grad in grads)
    return dq, dk, dv


def _layout(q: Tensor, k: Tensor, pattern: int, block_size: int) -> BlockLayout:
    return _patterns[pattern].layout(q.shape[1], k.shape[1], block_size=block_size, device=q.device)


@pattern_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, pattern: int, block_size: int, scale: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)


@pattern_attention_backward.register_fake
def _(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: int,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:  # type: ignore[type-arg]
    q, k, v, *ctx.settings, _ = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: torch.autograd.function.FunctionCtx, do: Tensor, dlse: Tensor) -> tuple:  # type: ignore[type-arg]
    grads = pattern_attention_backward(do, dlse, *ctx.saved_tensors, *ctx.settings)  # type: ignore[attr-defined]
    return *grads, None, None, None, None


pattern_attention.register_autograd(_backward, setup_context=_save_for_backward)
