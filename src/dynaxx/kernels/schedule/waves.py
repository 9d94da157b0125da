# SPDX-License-Identifier: Apache-2.0
"""Persistent programs that share the GPU with another kernel, such as an exchange between GPUs.

A persistent kernel starts one program per multiprocessor and divides the work evenly between them. If another kernel
occupies some multiprocessors, the programs that wait for them start late, and the whole kernel ends late. In several
waves, the GPU instead gives the programs of later waves to whichever multiprocessor is free. Kernels that need few
multiprocessors can instead have some for themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Sharing(NamedTuple):
    """How persistent kernels share the multiprocessors with other kernels."""

    waves: int = 1  # programs per multiprocessor, one after another: a late start delays the end by one of them
    left: int = 0  # multiprocessors without such programs, on which short kernels start at once, if there is one wave


class _Current(threading.local):
    sharing = Sharing()


_current = _Current()


def sharing() -> Sharing:
    """Return how a persistent kernel shares the multiprocessors."""
    return _current.sharing


@contextmanager
def share_multiprocessors(shared: Sharing | None) -> Iterator[None]:
    """Launch persistent kernels that share the multiprocessors within this context, in this thread; None: as before."""
    before = _current.sharing
    _current.sharing = before if shared is None else shared
    try:
        yield
    finally:
        _current.sharing = before
