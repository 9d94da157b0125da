# SPDX-License-Identifier: Apache-2.0
"""The snapshot file: a process's numbers as JSON, written whole every few seconds, for `dynaxx watch` and people.

A disk that is full or gone is counted and logged once; the file that was there stays, and no request notices.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from dynaxx.printable import printable
from dynaxx.storage import parse_json, read_regular_file, write_whole_file
from dynaxx.telemetry.recorder import Recorder, recorder
from dynaxx.telemetry.snapshot import Snapshot

INTERVAL = 5.0  # seconds between two writes
MOST_BYTES = 64 * 1024 * 1024  # of a snapshot file; one with every series that a process may have is smaller


class SnapshotFile:
    """Writes the numbers to `path` every `interval` seconds until `close()`, and once more then.

    The file belongs to the process that made this object: a forked child writes nothing, counts that it could not, and
    makes a file of its own if it should have one.

    Args:
        path: the file; its folder must exist.
        interval: seconds between two writes.
        numbers: this process's recorder by default.

    Raises:
        ValueError: the folder does not exist, or the interval is not positive.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, interval: float = INTERVAL, numbers: Recorder | None = None
    ) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(f"`path` must lie in a folder that exists, got {path}: make {self.path.parent}")
        if not interval > 0:
            raise ValueError(f"`interval` must be positive seconds, got {interval}")
        self._numbers = recorder() if numbers is None else numbers
        self._interval = interval
        self._process = os.getpid()
        self._closed, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dynaxx snapshot", daemon=True)
        self._thread.start()

    def write(self) -> bool:
        """Write now, and return whether it worked."""
        try:
            if os.getpid() != self._process:
                raise RuntimeError(f"{self.path} belongs to the process that was forked: make a file for each process")
            with self._writing:  # an older snapshot must not replace a newer one
                write_snapshot(self.path, Snapshot.of(self._numbers))
        except Exception as error:
            self._numbers.failed("snapshot file", error)
            return False
        return True

    def close(self) -> None:
        """Write once more and stop. More calls do nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self.write()

    def _run(self) -> None:
        self.write()
        while not self._closed.wait(self._interval):
            self.write()

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot. A reader at any moment sees the old file or the new one, whole.

    Raises:
        OSError: the file cannot be written; what was there is untouched.
    """
    text = json.dumps(snapshot.to_document(), allow_nan=False) + "\n"
    write_whole_file(path, lambda file: file.write(text.encode()), sync=False)


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read one file.

    Raises:
        ValueError: no such file, or not a snapshot file of this version; the message names the file.
        OSError: not a regular file of at most `MOST_BYTES` bytes, or it cannot be read.
    """
    shown = printable(os.fspath(path))
    try:
        return Snapshot.from_document(parse_json(read_regular_file(path, MOST_BYTES)))
    except FileNotFoundError:
        raise ValueError(f"{shown} does not exist; SnapshotFile(path) in the process writes it") from None
    except ValueError as error:
        raise ValueError(f"{shown} {error}") from None


def read_snapshots(paths: Sequence[str | os.PathLike[str]]) -> Snapshot:
    """Read the files of several processes as one snapshot; `Snapshot.faults` names those that cannot be read.

    Raises:
        ValueError, OSError: as `read_snapshot`, where no file can be read.
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
