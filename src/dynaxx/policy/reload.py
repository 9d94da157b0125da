"""Following a policy file: a new one that is good comes into force, a bad one leaves the old one there and says so."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dynaxx.errors import PolicyError
from dynaxx.policy.files import parse_policy
from dynaxx.policy.schema import Policy

MOST_BYTES = 64 * 1024 * 1024  # more is no policy
logger = logging.getLogger("dynaxx")


class PolicyFollower:
    """Looks at a policy file again and again, from a daemon thread or by `check`.

    The content decides, not its time stamp: neither a clock that goes back nor two writes within its grain matter.

    Args:
        accept: puts a policy in force, as a whole, and says whether it was another one; what it raises refuses the
            file. A method is held weakly: when its object is gone, the thread ends.
        refused: told why a file was not taken, once per content.
        interval: seconds between looks.
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
        threading.Thread(target=_look, args=(weakref.ref(self), self._stopped, self._interval), daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def check(self) -> bool:
        """Look once; whether a new policy came into force."""
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
                    logger.info("%s: is a policy again, and in force", self.path)
                return taken
            except Exception as error:  # whatever is wrong with a file, requests go on under the old policy
                logger.error("%s: not taken, the policy before it stays in force: %s", self.path, error)
                refused = self._refused()
                if refused is not None:
                    refused(type(error).__name__)
                return False

    def _read(self) -> bytes | str:
        """The content, or why there is none."""
        try:
            with open(self.path, "rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        return content if len(content) <= MOST_BYTES else f"is larger than {MOST_BYTES:,} bytes: not a policy"


def _look(follower: weakref.ref[PolicyFollower], stopped: threading.Event, interval: float) -> None:
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
