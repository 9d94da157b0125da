"""The snapshot file: a process's numbers as JSON, written whole every few seconds. For `dynaxx watch` and people.

A disk that is full or gone is counted and said once; the file that was there stays, and no request feels it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynaxx.telemetry.recorder import Recorder, recorder
from dynaxx.telemetry.snapshot import Snapshot

INTERVAL = 5.0  # seconds between two writes


class SnapshotFile:
    """Writes the numbers to `path` every `interval` seconds until `close()`, and once more then.

    Raises:
        ValueError: the folder does not exist, or an interval that is not positive.
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
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynaxx snapshot", daemon=True)
        self._thread.start()

    def write(self) -> bool:
        """Write now; whether it worked."""
        try:
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
    """Write a snapshot; a reader at any moment sees the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(snapshot.to_document(), allow_nan=False)
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read one file.

    Raises:
        ValueError: missing, or not a snapshot file of this version; the message names it.
        OSError: it cannot be read.
    """
    try:
        document: Any = json.loads(Path(path).read_bytes())
        return Snapshot.from_document(document)
    except FileNotFoundError:
        raise ValueError(f"{os.fspath(path)} does not exist; SnapshotFile(path) in the process writes it") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} {error}") from None


def read_all(paths: Sequence[str | os.PathLike[str]]) -> Snapshot:
    """Read one file or several, one per process, as one snapshot. Raises as `read_snapshot`."""
    return Snapshot.merged(read_snapshot(path) for path in paths)
