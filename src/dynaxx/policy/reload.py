# SPDX-License-Identifier: Apache-2.0
"""Follow a policy file: a good new policy comes into force; a bad one is logged, and the old one stays."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dynaxx.errors import PolicyError
from dynaxx.policy.files import MOST_BYTES, parse_policy
from dynaxx.policy.schema import Policy
from dynaxx.printable import printable
from dynaxx.storage import read_regular_file

logger = logging.getLogger("dynaxx")


class PolicyFollower:
    """Looks at a policy file again and again, from a daemon thread or by `check`.

    The content decides, not the time stamp, so a clock that goes back does no harm. A forked child follows with a
    thread of its own.

    Args:
        path: the policy file.
        accept: puts a policy in force, as a whole, and returns whether it differs from the one before. An exception
            refuses the file. A method is held weakly: when its object is gone, the thread ends.
        refused: told the type of error that refused a file, once per content.
        interval: seconds between looks.

    Raises:
        ValueError: `interval` is not positive.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        accept: Callable[[Policy], bool],
        refused: Callable[[str], Any] = lambda reason: None,
        *,
        interval: float = 1.0,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"`interval` must be > 0 seconds, got {interval}")
        self.path = os.fspath(path)
        self._accept, self._refused = _weak(accept), _weak(refused)
        self._interval = interval
        self._stopped = threading.Event()
        self._checking = threading.Lock()
        self._seen: str | None = None
        self._bad = False

    def start(self) -> None:
        """Look every `interval` seconds, in a daemon thread, until `stop`."""
        _STARTED.add(self)
        threading.Thread(
            target=_follow,
            args=(weakref.ref(self), self._stopped, self._interval),
            name="dynaxx policy follower",
            daemon=True,
        ).start()

    def stop(self) -> None:
        """Look no more."""
        _STARTED.discard(self)
        self._stopped.set()

    def check(self) -> bool:
        """Look once, and return whether a new policy came into force."""
        with self._checking:
            content = self._read()
            seen = content if isinstance(content, str) else hashlib.blake2b(content).hexdigest()
            if seen == self._seen:
                return False
            self._seen = seen
            before, self._bad = self._bad, True
            try:
                if isinstance(content, str):
                    raise PolicyError(content)
                accept = self._accept()
                if accept is None:
                    self.stop()
                    return False
                taken = bool(accept(parse_policy(content)))
                self._bad = False
                if before:
                    logger.info("%s: is a policy again, and in force", printable(self.path))
                return taken
            except Exception as error:  # whatever is wrong with a file, requests go on under the old policy
                logger.error(
                    "%s: not taken, the policy before it stays in force: %s",
                    printable(self.path),
                    printable(error, most=4000, keep="\n"),
                )
                refused = self._refused()
                if refused is not None:
                    refused(type(error).__name__)
                return False

    def _read(self) -> bytes | str:
        """Return the content, or why there is none."""
        try:
            return read_regular_file(self.path, MOST_BYTES)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"

    def _continue_after_fork(self) -> None:
        """Give a forked child locks that no lost thread holds, and a thread."""
        self._stopped, self._checking = threading.Event(), threading.Lock()
        self.start()


_STARTED: weakref.WeakSet[PolicyFollower] = weakref.WeakSet()  # followers whose thread runs


def _follow(follower: weakref.ref[PolicyFollower], stopped: threading.Event, interval: float) -> None:
    while not stopped.wait(interval):
        alive = follower()
        if alive is None:
            return
        alive.check()
        del alive


def _weak(function: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    if hasattr(function, "__self__") and hasattr(function, "__func__"):
        return weakref.WeakMethod(function)
    return lambda: function


def _after_fork() -> None:
    for follower in list(_STARTED):
        follower._continue_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
