# SPDX-License-Identifier: Apache-2.0
"""Loading of libraries from a cache folder, only if no other user can have written them.

A library runs with the rights of the user who loads it, and a cache folder may be shared. A library is therefore loaded
only if this user or root owns the folder and the file, if nobody else can write to them, and if the file has the digest
that was recorded when it was compiled.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class DigestError(ImportError):
    """The digest of a library is wrong: the file is truncated, or belongs to another build."""


def write_digest(library: Path) -> None:
    """Record the digest of a newly compiled library; the digest file is replaced atomically."""
    handle, temporary = tempfile.mkstemp(dir=library.parent, suffix=".sha256.tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(hashlib.sha256(library.read_bytes()).hexdigest())
        os.replace(temporary, digest_path(library))
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


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
