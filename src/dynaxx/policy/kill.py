# SPDX-License-Identifier: Apache-2.0
"""The kill switch: a file, a signal, the environment or a call makes everything dense from the next forward pass on."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

ENVIRONMENT = "DYNAXX_KILL"  # any value but "" and "0" engages
FILE_ENVIRONMENT = "DYNAXX_KILL_FILE"  # a path; the switch is engaged while a file is there

logger = logging.getLogger("dynaxx")


class KillSwitch:
    """A switch that is checked at the start of every forward pass. Any single source engages it.

    Args:
        parent: another switch. While it is engaged, this switch is engaged too.
    """

    def __init__(self, parent: KillSwitch | None = None) -> None:
        self._parent = parent
        self._reason: str | None = None
        self._signal = False
        self._logged_error: str | None = None

    def engage(self, reason: str = "call") -> None:
        """Run dense from the next pass on, until `release`."""
        self._reason = reason

    def release(self) -> None:
        """Undo `engage` and a signal. The environment and the file keep their effect."""
        self._reason, self._signal = None, False

    def engaged(self) -> str | None:
        """Return what engages the switch, None if nothing does.

        Returns:
            The reason given to `engage`, "signal", "environment", "file", or "unreadable file". The last means that it
            is unknown whether the kill file exists (no permission, an I/O error, an invalid path). The switch is then
            engaged to be safe, and an error is logged.
        """
        if self._reason is not None:
            return self._reason
        if self._signal:
            return "signal"
        if self._parent is not None:
            return self._parent.engaged()
        if os.environ.get(ENVIRONMENT, "0") not in ("", "0"):
            return "environment"
        file = os.environ.get(FILE_ENVIRONMENT)
        return self._engaged_by_file(file) if file else None

    def _engaged_by_file(self, file: str) -> str | None:
        try:
            os.lstat(file)  # does not follow links, since a dangling link counts as a file
        except FileNotFoundError:
            self._logged_error = None
            return None
        except (OSError, ValueError) as error:
            message = f"{file!r}: {error}"
            if message != self._logged_error:
                self._logged_error = message
                logger.error("kill file cannot be looked up, so everything runs dense: %s", message)
            return "unreadable file"
        self._logged_error = None
        return "file"

    def on_signals(self) -> None:
        """Let SIGUSR1 engage the switch and SIGUSR2 release it in this process. Opt-in: nothing else installs handlers.

        Raises:
            RuntimeError: called outside the main thread, which alone may set signal handlers, or on a system without
                these signals.
        """
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
            raise RuntimeError("signals can be set in the main thread of a POSIX process only; use a file or a call")
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.signal(signal.SIGUSR2, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number == signal.SIGUSR1


KILL_SWITCH = KillSwitch()  # the switch of this process
