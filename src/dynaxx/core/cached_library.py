# SPDX-License-Identifier: Apache-2.0
"""Loading of libraries from a cache folder, only if no other user can have written them.

A library runs with the rights of the user who loads it, and a cache folder may be shared. A library is therefore loaded
only if this user or root owns the folder and the file, if nobody else can write to them, and if the file has the digest
that was recorded when it was compiled.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path

from dynaxx.forks import LockFile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class DigestError(ImportError):
    """The digest of a library is wrong: the file is truncated, or belongs to another build."""


@contextmanager
def locked(folder: Path, temporary: str, patience: float) -> Iterator[None]:
    """Let one process at a time write to a cache folder, and remove what killed ones left there.

    Without locks, as on some network file systems, and after `patience` seconds several processes write: each replaces
    the file of another by an equal one.

    Args:
        folder: the folder.
        temporary: how the names of unfinished files begin.
        patience: seconds to wait for another process.

    Raises:
        ImportError: another user owns the folder or can write to it.
        OSError: the folder is not writable.
    """
    check_folder(folder)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    file = LockFile(lock)
    try:
        if _acquired(lock, patience):
            for path in folder.glob(f"{temporary}*"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        yield
    finally:
        file.close()


def _acquired(lock: int, patience: float) -> bool:
    end = time.monotonic() + patience
    while fcntl is not None and time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            break
    return False


def write_digest(library: Path, temporary: str) -> None:
    """Record the digest of a newly compiled library; the digest file is replaced atomically.

    Args:
        library: the library.
        temporary: how the names of unfinished files begin.
    """
    handle, unfinished = tempfile.mkstemp(prefix=temporary, dir=library.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(hashlib.sha256(library.read_bytes()).hexdigest())
        os.replace(unfinished, digest_path(library))
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)


def digest_path(library: Path) -> Path:
    """Return the path of a library's digest file."""
    return library.with_name(library.name + ".sha256")


def check_folder(folder: Path) -> None:
    """Check that only this user or root owns a folder and can write to it.

    Raises:
        ImportError: another user owns the folder or can write to it, or it is a link.
        OSError: the folder cannot be inspected.
    """
    _check_owner(os.lstat(folder), folder, stat.S_ISDIR)


def load(library: Path) -> CDLL:
    """Load a library from the cache.

    The file is opened once and checked through its descriptor, so the checked file is the loaded file even if another
    file replaces it in the meantime.

    Raises:
        DigestError: the file differs from what was compiled.
        ImportError: another user owns the file or can write to it.
        FileNotFoundError, OSError: the file does not exist, is not readable, or cannot be loaded.
    """
    descriptor = _checked_descriptor(library)
    opened = Path(f"/proc/self/fd/{descriptor}")
    # Keep the descriptor open: the loader identifies libraries by name, and this name must not be reused.
    return CDLL(str(opened if opened.exists() else library))


def _checked_descriptor(library: Path) -> int:
    check_folder(library.parent)
    wanted = _read(digest_path(library)).decode(errors="replace").strip()
    descriptor = _open(library)
    try:
        with open(os.dup(descriptor), "rb") as file:
            found = hashlib.sha256(file.read()).hexdigest()
        if found != wanted:
            raise DigestError(f"{library} is not the library that was compiled there: its digest differs")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(path: Path) -> int:
    """Open a regular file, not a link, that only this user or root can write to; return its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_owner(os.fstat(descriptor), path, stat.S_ISREG)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read(path: Path) -> bytes:
    with open(_open(path), "rb") as file:
        return file.read(1024)


def _check_owner(found: os.stat_result, path: Path, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(found.st_mode):
        raise ImportError(f"{path} must be a regular file in a regular folder, not a link or a device")
    user = os.geteuid() if hasattr(os, "geteuid") else found.st_uid
    if found.st_uid not in (user, 0) or found.st_mode & WRITABLE_BY_OTHERS:
        raise ImportError(
            f"{path} must belong to user {user} or root and be writable by no one else, got owner {found.st_uid} and "
            f"mode {stat.S_IMODE(found.st_mode):o}; set DYNAXX_CACHE to a folder of your own"
        )
