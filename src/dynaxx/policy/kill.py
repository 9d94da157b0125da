"""The kill switch: everything dense from the next forward pass on, by file, signal, environment or a call."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

ENVIRONMENT = "DYNAXX_KILL"  # any value but "" and "0" engages
FILE_ENVIRONMENT = "DYNAXX_KILL_FILE"  # a path; the switch is engaged while a file is there


class KillSwitch:
    """Asked at the start of every forward pass. Any one source is enough to engage it.

    Args:
        parent: a switch that engages this one, too.
    """

    def __init__(self, parent: KillSwitch | None = None) -> None:
        self._parent = parent
        self._reason: str | None = None
        self._signal = False

    def engage(self, reason: str = "call") -> None:
        """Dense from the next pass on, until `release`."""
        self._reason = reason

    def release(self) -> None:
        """Take back `engage`, and a signal; the environment and the file decide for themselves."""
        self._reason, self._signal = None, False

    def engaged(self) -> str | None:
        """What engages it: "call" or the given reason, "signal", "environment", "file"; None if nothing does."""
        if self._reason is not None:
            return self._reason
        if self._signal:
            return "signal"
        if self._parent is not None:
            return self._parent.engaged()
        if os.environ.get(ENVIRONMENT, "0") not in ("", "0"):
            return "environment"
        file = os.environ.get(FILE_ENVIRONMENT)
        return "file" if file and os.path.exists(file) else None

    def on_signals(self) -> None:
        """Let SIGUSR1 engage it and SIGUSR2 release it in this process. Never done unasked.

        Raises:
            RuntimeError: not the main thread, which alone may set signal handlers, or a system without them.
        """
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
            raise RuntimeError("signals can be set in the main thread of a POSIX process only; use a file or a call")
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.signal(signal.SIGUSR2, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number == signal.SIGUSR1


KILL_SWITCH = KillSwitch()  # of this process
