"""Kernels compute first derivatives; asked for second ones, their gradients say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the gradients of an `autograd.Function` refuse to be differentiated; a decorator of its backward.

    torch's `once_differentiable` looks at the incoming gradients alone: where these are constants, as of a sum, the
    second derivative by what was saved would be missing without a word.
    """

    @wraps(backward)
    def run(ctx: Any, *given: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *given)
        with torch.no_grad():
            grads = backward(ctx, *given)
        there = [i for i, grad in enumerate(grads) if isinstance(grad, Tensor)]
        refusing = iter(_Refuse.apply(len(there), *(grads[i] for i in there), *ctx.saved_tensors, *given))
        return tuple(next(refusing) if i in there else grad for i, grad in enumerate(grads))

    return run


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "the kernels of dynaxx have no second derivatives; backend='reference' has them, of `sparse_attention`"
        )
