# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent: write beside the target, sync, rename. A kill or a full disk leaves no half."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dynaxx.storage import parse_json, read_regular_file, write_whole_file

MOST_BYTES = 256 * 1024 * 1024  # bytes of a result file; an analysis of 16,000 heads takes 100 MB
MOST_OBJECTS = 1 << 22
ROOM = 1 << 20  # bytes that a disk must have left before long work begins
LEFTOVER_SECONDS = 600  # seconds; no write of a file takes longer without progress


class OutOfSpaceError(OSError):
    """The disk is full; the message names the file and what to do. The previous file, if any, is untouched."""


def write_text(path: Path | str, text: str) -> Path:
    """Write a UTF-8 text file in one step; return its path.

    Raises:
        OutOfSpaceError: no room; nothing was changed.
        OSError: no permission, no such folder and so on; nothing was changed.
    """
    return write_file(path, lambda file: file.write(text.encode()))


def write_bytes(path: Path | str, data: bytes) -> Path:
    """Write a binary file in one step; return its path. Errors as `write_text`."""
    return write_file(path, lambda file: file.write(data))


def write_file(path: Path | str, fill: Callable[[IO[bytes]], object]) -> Path:
    """Write what `fill` writes to a binary file, in one step; return its path. Errors as `write_text`, and fill's own.

    What writes of this file left beside it that were killed some time ago is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        _remove_leftover(leftover)
    with explain_full_disk(path):
        write_whole_file(path, fill)
    return path


def write_json(path: Path | str, document: Any) -> Path:
    """Write strict JSON (no NaN) in one step, keys in the order given; return its path.

    Raises:
        ValueError: NaN or infinity, which JSON cannot say.
        TypeError: a value that is not JSON.
        OSError: as `write_text`.
    """
    return write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def check_target(path: Path | str) -> None:
    """Raise, before long work, the OSError that writing this file would end in; leave nothing behind.

    Raises:
        OutOfSpaceError: the disk has not even `ROOM` bytes left.
        OSError: no permission, a mount that is read-only, a folder in the way and so on.
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
            os.fsync(file.fileno())  # some systems say only here that there is no room
    except OutOfSpaceError:
        raise
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or errno.EIO), str(there)) from None


def read_json(path: Path | str) -> Any:
    """Read a JSON file that may come from anybody.

    Raises:
        ValueError: the file is missing, not a regular file, too large, or not JSON; the message names it.
        OSError: it cannot be read.
    """
    try:
        return parse_json(read_regular_file(path, MOST_BYTES), most_objects=MOST_OBJECTS)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def sync_tree(folder: Path) -> None:
    """Bring every file below `folder`, and the folders themselves, to the disk."""
    for base, _, names in os.walk(folder):
        for name in names:
            _sync_path(Path(base) / name)
        _sync_path(Path(base))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that becomes `path` in one step, and is removed if filling it fails.

    Raises:
        ValueError: there is something at `path`; nothing was changed.
        OutOfSpaceError: no room; the same.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} is there already: remove it, or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as temporary, explain_full_disk(path):
        temporary.mkdir()
        yield temporary
        sync_tree(temporary)
        temporary.rename(path)


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target`, removed at the end unless it was renamed."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    remove(temporary)
    try:
        yield temporary
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def explain_full_disk(path: Path | str) -> Iterator[None]:
    """Turn "no space left" (also a quota) into an `OutOfSpaceError` that names what was being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"no space left to write {path}; free some, or choose another folder (what was there is untouched)"
        raise OutOfSpaceError(error.errno, message) from error


def _remove_leftover(path: Path) -> None:
    """Remove a leftover file unless it is young: its writer, here or on another machine, may still be at work."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
            path.unlink()


def _sync_path(path: Path) -> None:
    """Flush a file to disk (fsync), or a folder if the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder on Windows cannot be opened; its rename is journaled there
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
