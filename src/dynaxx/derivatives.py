# SPDX-License-Identifier: Apache-2.0
"""Refuse the derivatives that the kernels lack. They have first derivatives in reverse mode only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from dynaxx.arguments import resolved


def transforms_active() -> bool:
    """Return whether a transform of `torch.func` (grad, vjp, vmap, jvp) is active, so that tensors may be wrapped."""
    return torch._C._are_functorch_transforms_active()


@contextmanager
def untransformed() -> Iterator[None]:
    """Leave `torch.jit.trace` and transforms of `torch.func` within the block, so that new tensors may be kept.

    A tracer would record how memory is allocated, but not what the core writes there.
    """
    if torch.compiler.is_compiling() or not (transforms_active() or torch._C._get_tracing_state() is not None):
        yield
        return
    trace: Any = torch._C  # its types do not name what sets the state
    state = trace._get_tracing_state()
    trace._set_tracing_state(None)
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        trace._set_tracing_state(state)


def refuse_compiled_transforms(name: str) -> None:
    """Raise NotImplementedError if a compiler traces an operation within `torch.func`.

    Without `fullgraph`, the compiler then leaves the transformed function to Python, which computes it.
    """
    if transforms_active():
        raise NotImplementedError(
            f"{name} within torch.func (grad, vjp, vmap) cannot be compiled into one graph; use fullgraph=False, or "
            "compile the function itself and take gradients by backward"
        )


def have_tangents(*tensors: Tensor | None) -> bool:
    """Return whether a tensor has a tangent, for a forward-mode derivative (jvp, jacfwd, hessian)."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError for a tensor with a tangent, which the kernels would drop silently."""
    if have_tangents(*tensors):
        raise NotImplementedError(
            "the kernels of dynaxx have no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode "
            "(backward, torch.func.grad, vjp, jacrev), or backend='reference' of `sparse_attention`"
        )


def refuse_transforms(name: str, *tensors: Tensor | None, fix: str = "use backward, and a batch for vmap") -> None:
    """Raise NotImplementedError if `torch.func`, forward mode or a tensor without memory reaches an operation."""
    if transforms_active():
        raise NotImplementedError(
            f"{name} has no rules for torch.func (grad, vjp, vmap), as `sparse_attention` has; {fix}"
        )
    refuse_recording(name)
    refuse_forward_mode(*tensors)
    refuse_without_memory(name, *tensors)


def refuse_recording(name: str) -> None:
    """Raise NotImplementedError if torch.jit.trace or torch.export records an operation that depends on values."""
    recorder = "torch.jit.trace" if torch._C._get_tracing_state() is not None else "torch.export"
    if recorder == "torch.jit.trace" or is_exporting():
        raise NotImplementedError(
            f"{name} cannot be recorded by {recorder}, as `sparse_attention` can, because it depends on values of "
            "tensors; call it outside the recorded function, or use torch.compile without fullgraph"
        )


def is_exporting() -> bool:
    """Return whether torch.export is tracing; in code that torch.compile of 2.11 traces, torch always says so."""
    return torch.compiler._is_exporting_flag if _HAS_FLAG else torch.compiler.is_exporting()


_HAS_FLAG = hasattr(torch.compiler, "_is_exporting_flag")
_NO_MEMORY = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def refuse_without_memory(name: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError for tensors that stand for others, such as fake tensors: kernels would read address 0.

    A tracer (`make_fx`) is refused too, because it would record the result of a kernel as a constant.
    """
    if torch.compiler.is_compiling():
        return
    stands = [type(x).__name__ for x in tensors if isinstance(x, Tensor) and _dispatches(x)]
    if torch._C._len_torch_dispatch_stack():
        modes = (torch._C._get_dispatch_mode(key) for key in _NO_MEMORY)
        stands += [type(mode).__name__ for mode in modes if mode is not None]
    if stands:
        raise _without_memory(name, stands[0])


def check_memory(*tensors: Tensor) -> None:
    """Raise NotImplementedError for a tensor with elements but without memory: the core would read address 0."""
    for x in tensors:
        if (type(x) is not Tensor and _dispatches(x)) or not (x.data_ptr() or not x.numel()):
            raise _without_memory("the CPU core", type(x).__name__)


def _without_memory(name: str, kind: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} needs tensors with memory of their own, got {kind}; call it outside of FakeTensorMode and make_fx, "
        "and on the local part of a distributed tensor"
    )


def _dispatches(x: Tensor) -> bool:
    """Return whether a subclass handles operations itself, and may have no memory."""
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def no_second_derivative() -> NotImplementedError:
    """Return the error for a derivative of a gradient."""
    return NotImplementedError(
        "the kernels of dynaxx have no second derivatives; use `sparse_attention` with backend='reference'"
    )


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an `autograd.Function`, so that differentiating its gradients raises an error.

    Gradients with a pending sign are resolved, because kernels read their memory.

    torch's `once_differentiable` checks only the incoming gradients. If these are constants, as for the gradient of a
    sum, it would silently drop the second derivative with respect to the saved tensors.
    """

    @wraps(backward)
    def run(ctx: Any, *given: Tensor | None) -> Any:
        given = tuple(map(resolved, given))
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
        raise no_second_derivative()
