# SPDX-License-Identifier: Apache-2.0
"""The threads of a launch of the core: how many, and whether they are OpenMP's, as torch's, or the core's own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dynaxx.core.library import active_library


class _Here(threading.local):
    count: int = 0  # threads that `own_threads` promised this thread's launches; 0 outside of it


_here = _Here()


def num_threads() -> int:
    """Return the number of threads of a launch: as `own_threads` says, else `torch.get_num_threads()`."""
    return _here.count or torch.get_num_threads()


@contextmanager
def own_threads() -> Iterator[None]:
    """Run the calling thread's launches on threads of the core's own, as many as `torch.get_num_threads()`.

    For callers on the threads of another runtime, such as operators inside OpenVINO: OpenMP's workers spin for
    milliseconds after each launch, on cores that the other runtime needs. Meanwhile torch's own operations, and MKL's
    inside torch, use one thread. Without a core, nothing changes.
    """
    library = active_library()
    if library is None or _here.count:
        yield
        return
    _here.count = torch.get_num_threads()
    library.dynaxx_cpu_own_threads(1)
    before = _threads_of_mkl()(1)
    try:
        yield
    finally:
        _threads_of_mkl()(before)
        library.dynaxx_cpu_own_threads(0)
        _here.count = 0


@cache
def _threads_of_mkl() -> Callable[[int], Any]:
    """Return MKL's function that sets how many threads it uses for the calling thread, 0 for the default."""
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):  # a build of torch without MKL
        return lambda threads: 0
    found.argtypes, found.restype = [ctypes.c_int], ctypes.c_int
    return found
