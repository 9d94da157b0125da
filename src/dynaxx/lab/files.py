# SPDX-License-Identifier: Apache-2.0
"""Write files whole or not at all: write beside the target, sync, rename."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dynaxx import storage
from dynaxx.forks import LockFile
from dynaxx.storage import parse_json, read_regular_file, write_whole_file

MAX_BYTES = 256 * 1024 * 1024  # limit on a result file; an analysis of 16,000 heads takes 100 MB
MAX_OBJECTS = 1 << 22
ROOM = 1 << 20  # free bytes that a disk must have before long work starts


class OutOfSpaceError(OSError):
    """The disk is full. The message names the file and the fix. A previous file is untouched."""


def write_text(path: Path | str, text: str) -> Path:
    """Write a UTF-8 text file in one step; return its path.

    Raises:
        OutOfSpaceError: the disk is full; nothing was changed.
        OSError: there is no permission, no such folder and so on; nothing was changed.
    """
    return write_file(path, lambda file: file.write(text.encode()))


def write_bytes(path: Path | str, data: bytes) -> Path:
    """Write a binary file in one step; return its path. Raises as `write_text` does."""
    return write_file(path, lambda file: file.write(data))


def write_file(path: Path | str, fill: Callable[[IO[bytes]], object]) -> Path:
    """Write a binary file with `fill` in one step; return its path. Raises as `write_text` and `fill` do."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(path):
        write_whole_file(path, fill)
    return path


def write_json(path: Path | str, document: Any) -> Path:
    """Write strict JSON (no NaN) in one step, with keys in the given order; return its path.

    Raises:
        ValueError: a number is NaN or infinite.
        TypeError: a value has no JSON form.
        OSError: see `write_text`.
    """
    return write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def state_of(path: Path) -> Path:
    """Return the file that keeps the measurements of a stopped run until its result `path` is written."""
    return path.with_name(f"{path.stem}_state.jsonl")


def write_result(path: Path, document: Any) -> Path:
    """Write a result as JSON, and remove what was kept in case that its run is stopped; return its path."""
    write_json(path, document)
    state_of(path).unlink(missing_ok=True)
    return path


def check_target(path: Path | str) -> None:
    """Check before long work that a file can be written. Leaves nothing behind.

    Raises:
        OutOfSpaceError: the disk has less than `ROOM` bytes left.
        OSError: there is no permission, the mount is read-only, the path is a folder and so on.
    """
    path = Path(path)
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    try:
        with explain_full_disk(path), tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())  # some systems report a full disk only here
    except OutOfSpaceError:
        raise
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or errno.EIO), str(there)) from None


def read_json(path: Path | str) -> Any:
    """Read a JSON file that may be untrusted.

    Raises:
        ValueError: the file is missing, not a regular file, too large, or not JSON; the message names it.
        OSError: the file cannot be read.
    """
    try:
        return parse_json(read_regular_file(path, MAX_BYTES), most_objects=MAX_OBJECTS)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Do what `storage.new_folder` does.

    Raises:
        ValueError: `path` exists and is not an empty folder; nothing was changed.
        OutOfSpaceError: the disk is full; nothing was changed.
    """
    with explain_full_disk(path), storage.new_folder(path) as temporary:
        yield temporary


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep a folder, which is made if it is missing, from other processes that call this, where the system has locks.

    A folder that was made and stays empty is removed.

    Raises:
        ValueError: another process works in it.
        OSError: it cannot be made.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    held = None
    try:
        with suppress(ImportError, OSError):  # Windows, or a file system without locks
            import fcntl

            descriptor = os.open(folder, os.O_RDONLY)
            held = LockFile(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                said = f"another run works in {folder}; wait until it ends, or give another --out"
                raise ValueError(said) from None
        yield
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        if held is not None:
            held.close()


@contextmanager
def explain_full_disk(path: Path | str) -> Iterator[None]:
    """Turn "no space left", exceeded quotas and limits on file sizes into an `OutOfSpaceError` that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            message = f"files may not grow large enough to write {path}; raise the limit on file sizes (`ulimit -f`)"
            raise OutOfSpaceError(error.errno, message) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"no space left to write {path}; free some, or choose another folder (the old file is untouched)"
        raise OutOfSpaceError(error.errno, message) from error
