# SPDX-License-Identifier: Apache-2.0
"""Persistent programs that share the GPU with another kernel, such as an exchange between GPUs.

A persistent kernel starts one program per multiprocessor and divides the work evenly between them. If another kernel
occupies some multiprocessors, the programs that wait for them start late, and the whole kernel ends late. In several
waves, the GPU instead gives the programs of later waves to whichever multiprocessor is free.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHARED_WAVES = 32  # a program then does little of the work, so a late start delays the end by at most that
SHARED_LEFT = 0  # multiprocessors that persistent kernels leave to others


class _Current(threading.local):
    waves, left = 1, 0


_current = _Current()


def shared_waves() -> int:
    """Return the number of programs per multiprocessor that a persistent kernel starts, one after another."""
    return _current.waves


def left_multiprocessors() -> int:
    """Return the number of multiprocessors that a persistent kernel leaves to others."""
    return _current.left


@contextmanager
def share_multiprocessors(shared: bool = True) -> Iterator[None]:
    """Launch persistent kernels in several waves within this context, in this thread."""
    before = _current.waves, _current.left
    if shared:
        _current.waves, _current.left = SHARED_WAVES, SHARED_LEFT
    try:
        yield
    finally:
        _current.waves, _current.left = before
