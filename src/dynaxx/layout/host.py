# SPDX-License-Identifier: Apache-2.0
"""Helpers for tensors on the host: their device, their addresses for the core, and copies of several to a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import addressof, c_int64
from functools import lru_cache, wraps
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, ParamSpec, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.derivatives import check_memory, transforms_active, untransformed

P = ParamSpec("P")
R = TypeVar("R")


# Asked here, because torch.compile of torch 2.11 cannot trace the question.
AUTOCAST_DEVICES = frozenset(x for x in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(x))


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it multiplies in the dtypes of its tensors. Autocast would change choices."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, AUTOCAST_DEVICES):
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


def on_host(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that tensors it creates without a device are created on the CPU, and are plain tensors.

    Layouts are computed on the CPU from host integers. Under a user's `torch.set_default_device`, their tensors would
    silently land on another device or be mixed with tensors there; within `torch.func`, they would belong to the
    transform. A function that gets a transformed tensor stays within the transform. Autocast is off. Compilers do not
    trace the function.
    """
    function = without_autocast(never_traced(function))

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if transforms_active():
            plain: Any = [without_gradient(x) for x in args], {name: without_gradient(x) for name, x in kwargs.items()}
            if not any(map(_is_transformed, (*plain[0], *plain[1].values()))):
                with untransformed():
                    return run(*plain[0], **plain[1])
        if not torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


def lasting(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that makes a layout, as `on_host` does, so that training may use the layout later.

    Tensors made under `torch.inference_mode` cannot be saved for a backward pass.
    """
    function = on_host(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


def without_gradient(x: Any) -> Any:
    """Return a tensor of integers or booleans without the wrappers of `torch.func.grad`, which mean nothing there."""
    while isinstance(x, Tensor) and not x.is_floating_point() and torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def lasting_copy(x: Any) -> Any:
    """Return a copied tensor as one that training may save later; see `lasting`."""
    x = without_gradient(x)
    if not isinstance(x, Tensor) or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def _is_transformed(x: object) -> bool:
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def refuse_mapped(value: Any) -> None:
    """Raise NotImplementedError for a tensor with a dimension that `torch.func.vmap` hides."""
    while _is_transformed(value):
        if torch._C._functorch.is_batchedtensor(value):
            raise NotImplementedError(
                "layouts depend on the values of their tensors, which torch.func.vmap hides; make them outside it"
            )
        value = torch._C._functorch.get_unwrapped(value)


NOT_TRACED = (
    "it reads memory on the host; call it outside of the compiled function and pass its result, such as a layout, as "
    "an argument, or compile without fullgraph"
)


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that passes addresses of tensors to the core, so that `torch.compile` calls it as it is.

    A compiler splits a traced function where it asks for an address. Tensors that are not used after that place are
    then freed before the core reads them. `torch.compiler.disable` would do the same, but loads the compiler.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # with what it calls
    inner: Any = function
    while True:
        inner._torchdynamo_disable, inner._torchdynamo_disable_msg = True, NOT_TRACED
        if not hasattr(inner, "__wrapped__"):
            break
        inner = inner.__wrapped__
    frames.set_code_exec_strategy(inner.__code__, skip)  # other functions share the code of wrappers
    return function


_NOTHING = c_int64(0)


def address(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, strided: bool = False) -> int:
    """Return the address of a tensor for the core, which trusts what it is told of the memory there.

    torch gives empty tensors the address 0, which the core would read as "absent". They get a valid address instead.

    Args:
        x: the tensor.
        dtype: the dtype that the core reads or writes.
        shape: the shape that the core assumes.
        strided: whether the core is told the strides; only the last dimension must then be contiguous.

    Raises:
        RuntimeError: the tensor has another dtype, shape or device, or is not contiguous. This is a bug of dynaxx.
        NotImplementedError: the tensor has no memory.
    """
    whole = not x.numel() or ((x.stride()[-1] == 1 or shape[-1] == 1) if strided else x.is_contiguous())
    if x.dtype is not dtype or x.shape != shape or not whole or not x.is_cpu:
        raise RuntimeError(
            f"the CPU core needs {dtype} {tuple(shape)} on the CPU, got {x.dtype} {tuple(x.shape)} on {x.device} with "
            f"strides {x.stride()}; please report this bug"
        )
    check_memory(x)
    return x.data_ptr() or addressof(_NOTHING)


def on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to a device as int32 tensors in one allocation, 16-byte aligned, in one asynchronous copy."""
    shapes = [x.shape for x in arrays]
    packed = torch.empty(dense_size(shapes), dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
    for x, copy in zip(arrays, dense_views(packed, shapes), strict=True):
        copy.numpy()[...] = x
    return dense_views(packed.to(device, non_blocking=device.type == "cuda"), shapes)


def dense_size(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the elements of a buffer for `dense_views`."""
    return sum(size + -size % 4 for size in map(prod, shapes))


def dense_views(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return consecutive views of one buffer with these shapes, each starting at a multiple of four elements."""
    return [numbers.as_strided(*view) for view in _dense_places(tuple(shapes))]


@lru_cache(maxsize=4096)
def _dense_places(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Return shape, strides and first element of each view."""
    steps = [tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else () for shape in shapes]
    starts = [dense_size(shapes[:i]) for i in range(len(shapes))]
    return list(zip(shapes, steps, starts, strict=True))


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy int32 tensors to a device; copies from the host to a GPU are made in one transfer by `on_device`.

    Only a copy to a GPU is asynchronous. A copy to the host waits, because unfinished copies would read as garbage.
    """
    if device.type != "cuda" or any(x.device.type != "cpu" for x in tensors):
        return [x.to(device, non_blocking=device.type == "cuda") for x in tensors]
    return on_device([x.numpy() for x in tensors], device)
