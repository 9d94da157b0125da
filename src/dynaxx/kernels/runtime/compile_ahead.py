# SPDX-License-Identifier: Apache-2.0
"""Compile kernels ahead of their first launch, in several processes side by side.

Much of Triton's compiler holds Python's lock, so threads hardly help. Processes share the results through Triton's
cache on disk. They are forks, because a kernel and its arguments cannot be sent to another process; a fork compiles and
exits, and never uses the GPU.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynaxx.kernels.runtime.launcher import compiling_only

MAX_SECONDS = 30.0  # longest wait for the forks; then this process compiles what is missing
MAX_SECONDS_EACH = 4.0  # more for each kernel that a fork compiles
FILLED = {
    torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
}


def compile_ahead(call: Callable[[], object], processes: int) -> int:
    """Compile the kernels that `call` would launch, and launch none of them.

    Args:
        call: calls functions that launch kernels. Their results are zeros.
        processes: number of processes that compile.

    Returns:
        The number of kernels that were not compiled yet. It is 0 if Triton is too old to collect them.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return 0
    pending = _Pending()
    with AsyncCompileMode(pending, ignore_errors=True):
        try:
            with compiling_only(), _Zeros():
                call()
        finally:
            pending.compile(processes)
    return len(pending.found)


class _Pending(Executor):
    """Compilations that Triton has asked for."""

    def __init__(self) -> None:
        self.found: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.found.append((fn, future))
        return future

    def compile(self, processes: int) -> None:
        """Compile in forks, and load the results, or compile what the forks did not."""
        count = min(processes, len(self.found))
        if count > 1:
            compiles = [compile for compile, _ in self.found]
            most = MAX_SECONDS + MAX_SECONDS_EACH * -(-len(compiles) // count)
            _wait([_fork(compiles[at::count]) for at in range(count)], time.monotonic() + most)
        for compile, future in self.found:
            try:
                future.set_result(compile())
            except Exception as error:  # the launch of this kernel will raise it again
                future.set_exception(error)


class _Zeros(TorchDispatchMode):
    """Fill new tensors, so that numbers of kernels that were not launched are valid indices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FILLED:
            kwargs.pop("memory_format", None)
            return FILLED[func](*args, **kwargs)
        return func(*args, **kwargs)


def _fork(compiles: list[Callable[[], Any]]) -> int:
    """Compile in a fork of this process; return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads must not wait for them
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.disable()  # tensors of the parent must not be freed here
        for compile in compiles:
            compile()
        code = 0
    finally:
        os._exit(code)


def _wait(children: list[int], until: float) -> None:
    """Wait for forks, and end those that take too long."""
    left = list(children)
    while left := [child for child in left if not _ended(child, os.WNOHANG)]:
        if time.monotonic() > until:
            for child in left:
                os.kill(child, signal.SIGKILL)
                _ended(child, 0)
            return
        time.sleep(0.02)


def _ended(child: int, flags: int) -> bool:
    try:
        return os.waitpid(child, flags)[0] != 0
    except ChildProcessError:  # something else in this process waits for all children
        return True
