# SPDX-License-Identifier: Apache-2.0
"""Tensors of the host: they say so, whatever `torch.set_default_device` says, and go to a GPU together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def on_host(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function so that tensors it makes without naming a device are made on the CPU.

    Layouts are computed there from integers of the host. Where a user has made another device the default, they would
    silently be computed on that, or mixed with it.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


def on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Integers as int32 tensors in one piece of memory, each at 16 bytes; to a GPU in one copy, without waiting."""
    places, size = [], 0
    for x in arrays:
        places.append(size)
        size += x.size + -x.size % 4
    packed = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = packed.numpy()
    for x, place in zip(arrays, places, strict=True):
        numbers[place : place + x.size] = x.ravel()
    return dense_views(packed.to(device, non_blocking=device.type == "cuda"), [x.shape for x in arrays])


def dense_views(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes behind one another in one piece of memory, each at a multiple of four numbers."""
    found, place = [], 0
    for shape in shapes:
        steps, size = [], 1
        for length in reversed(shape):
            steps.append(size)
            size *= length
        found.append(numbers.as_strided(shape, steps[::-1], place))
        place += size + -size % 4
    return found


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """int32 tensors on another device: from the host to a GPU as `on_device`.

    To the host it waits: what has not arrived yet reads as anything.
    """
    if device.type != "cuda" or any(x.device.type != "cpu" for x in tensors):
        return [x.to(device, non_blocking=device.type == "cuda") for x in tensors]
    return on_device([x.numpy() for x in tensors], device)
