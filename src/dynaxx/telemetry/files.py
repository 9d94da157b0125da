# SPDX-License-Identifier: Apache-2.0
"""The snapshot file: the metrics of a process as JSON, written whole every few seconds, for `dynaxx watch`.

A full or missing disk is counted and logged once. The old file stays, and requests are not affected.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from dynaxx.forks import new_event, new_lock
from dynaxx.printable import printable
from dynaxx.storage import parse_json, read_regular_file, write_whole_file
from dynaxx.telemetry.recorder import Recorder, recorder
from dynaxx.telemetry.snapshot import Snapshot

INTERVAL = 5.0  # seconds between two writes
MAX_BYTES = 64 * 1024 * 1024  # limit on a snapshot file; a file with all series that a process may have is smaller


class SnapshotFile(AbstractContextManager["SnapshotFile"]):
    """Write the metrics to `path` every `interval` seconds until `close()`, which writes once more.

    The file belongs to the process that created this object. A forked child writes nothing and counts an error; create
    another file in the child if you need one.

    Args:
        path: the file; its folder must exist.
        interval: seconds between two writes.
        numbers: the recorder; this process's recorder by default.

    Raises:
        ValueError: the folder does not exist, or the interval is not positive.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, interval: float = INTERVAL, numbers: Recorder | None = None
    ) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(f"`path` must be in an existing folder, got {path}; create {self.path.parent}")
        if not interval > 0:
            raise ValueError(f"`interval` must be > 0 seconds, got {interval}")
        self._numbers = recorder() if numbers is None else numbers
        self._interval = interval
        self._process = os.getpid()
        self._closed, self._writing = new_event(), new_lock()
        self._thread = threading.Thread(target=self._run, name="dynaxx snapshot", daemon=True)
        self._thread.start()

    def write(self) -> bool:
        """Write the file now, and return whether it succeeded."""
        try:
            if os.getpid() != self._process:
                raise RuntimeError(f"{self.path} belongs to the parent process; create one file per process")
            with self._writing:  # an older snapshot must not replace a newer one
                write_snapshot(self.path, Snapshot.of(self._numbers))
        except Exception as error:
            self._numbers.failed("snapshot file", error)
            return False
        return True

    def close(self) -> None:
        """Write once more and stop. Further calls do nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self.write()

    def _run(self) -> None:
        self.write()
        while not self._closed.wait(self._interval):
            self.write()

    def __exit__(self, *_: object) -> None:
        """Write the file once more and stop."""
        self.close()


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot. Readers always see either the whole old file or the whole new one.

    Raises:
        OSError: the file cannot be written; the old file is untouched.
    """
    text = json.dumps(snapshot.to_document(), allow_nan=False) + "\n"
    write_whole_file(path, lambda file: file.write(text.encode()), sync=False)


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read one file.

    Raises:
        ValueError: the file does not exist or is not a snapshot file of this version; the message names the file.
        OSError: the file is not a regular file of at most `MAX_BYTES` bytes, or cannot be read.
    """
    shown = printable(os.fspath(path))
    try:
        return Snapshot.from_document(parse_json(read_regular_file(path, MAX_BYTES)))
    except FileNotFoundError:
        raise ValueError(f"{shown} does not exist; SnapshotFile(path) in the process writes it") from None
    except ValueError as error:
        raise ValueError(f"{shown} {error}") from None


def read_snapshots(paths: Sequence[str | os.PathLike[str]]) -> Snapshot:
    """Read the files of several processes as one snapshot. `Snapshot.faults` names the files that cannot be read.

    Raises:
        ValueError: no file can be read, see `read_snapshot`.
        OSError: no file can be read, see `read_snapshot`.
    """
    found: list[Snapshot] = []
    errors: list[ValueError | OSError] = []
    for path in paths:
        try:
            found.append(read_snapshot(path))
        except (ValueError, OSError) as error:
            errors.append(error)
    if errors and not found:
        raise errors[0]
    return Snapshot.merged(found, faults=tuple(printable(error, most=300) for error in errors))
