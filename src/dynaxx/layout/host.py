"""Tensors that say no device are the host's, whatever `torch.set_default_device` says."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

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
