# SPDX-License-Identifier: Apache-2.0
"""Follow a policy file: apply valid new policies; log invalid ones and keep the old policy."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dynaxx.errors import PolicyError
from dynaxx.forks import in_child, new_event, new_lock
from dynaxx.policy.files import MAX_BYTES, parse_policy
from dynaxx.policy.schema import Policy
from dynaxx.printable import printable
from dynaxx.storage import read_regular_file

logger = logging.getLogger("dynaxx")


class PolicyFollower:
    """Check a policy file regularly in a daemon thread, or on demand with `check`.

    The content decides, not the time stamp, so clock changes do no harm. A forked child starts its own thread.

    Args:
        path: the policy file.
        accept: a function that applies a policy as a whole and returns whether it differs from the previous one. An
            exception rejects the file. A method is referenced weakly: the thread ends when its object is collected.
        refused: a function that receives the type of the error that rejected a file, once per content.
        interval: seconds between checks.

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
        self._stopped, self._checking = new_event(), new_lock()
        self._started = False
        in_child(self, PolicyFollower._continue_after_fork)
        self._seen: str | None = None
        self._bad = False

    def start(self) -> None:
        """Check every `interval` seconds in a daemon thread, until `stop`."""
        self._started = True
        threading.Thread(
            target=_follow,
            args=(weakref.ref(self), self._stopped, self._interval),
            name="dynaxx policy follower",
            daemon=True,
        ).start()

    def stop(self) -> None:
        """Stop the thread."""
        self._started = False
        self._stopped.set()

    def check(self) -> bool:
        """Check the file once, and return whether a new policy was applied."""
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
                    logger.info("%s: is a valid policy again, and in force", printable(self.path))
                return taken
            except Exception as error:  # no file may break requests, which continue under the old policy
                logger.error(
                    "%s: rejected, the previous policy stays in force: %s",
                    printable(self.path),
                    printable(error, most=4000, keep="\n"),
                )
                refused = self._refused()
                if refused is not None:
                    refused(type(error).__name__)
                return False

    def _read(self) -> bytes | str:
        """Return the content, or the reason why it cannot be read."""
        try:
            return read_regular_file(self.path, MAX_BYTES)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"

    def _continue_after_fork(self) -> None:
        """Start a thread in a forked child, and read the file anew: another thread may have been within a check."""
        self._seen = None
        if self._started:
            self.start()


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
