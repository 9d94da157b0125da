# SPDX-License-Identifier: Apache-2.0
"""Locks, events and threads across a fork of the process. The only place of the package that registers with `os`.

A forked child has only the thread that forked. A lock that another thread held stays locked in the child, and whoever
takes it waits forever. So the package takes its locks and events from here. In a child, all locks are free, events have
new internals, and then the owners of threads are told. What a lock guards may be half changed there: such state is
counts and samples, which start anew or stay plausible.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
_events: weakref.WeakSet[threading.Event] = weakref.WeakSet()
_owners: dict[weakref.ref[Any], Callable[[Any], Any]] = {}  # in order of registration


def new_lock() -> threading.Lock:
    """Return a lock that is free in a forked child."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def new_event() -> threading.Event:
    """Return an event that works in a forked child, and is set there if it was set in the parent."""
    event = threading.Event()
    _events.add(event)
    return event


def in_child(owner: Any, renew: Callable[[Any], Any]) -> None:
    """Call `renew(owner)` in forked children, as long as the owner exists. `renew` must not refer to the owner."""
    _owners[weakref.ref(owner, _forget)] = renew


class LockFile:
    """A descriptor that a forked child closes: the lock of a file lasts as long as any process has its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        in_child(self, LockFile.close)

    def close(self) -> None:
        """Close the descriptor, once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _forget(reference: weakref.ref[Any]) -> None:
    _owners.pop(reference, None)


def _after_fork_in_child() -> None:
    for lock in list(_locks):  # as the standard library does; `locked` is late to tell of a thread that got it just now
        lock._at_fork_reinit()  # type: ignore[attr-defined]
    for event in list(_events):
        was_set = event.is_set()
        event.__init__()  # type: ignore[misc]  # a thread that is gone may hold its lock
        if was_set:
            event.set()
    for reference, renew in list(_owners.items()):
        owner = reference()
        if owner is not None:
            renew(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
