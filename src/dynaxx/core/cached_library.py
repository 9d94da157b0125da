# SPDX-License-Identifier: Apache-2.0
"""Libraries in a cache folder: opened only if nobody else can have written them.

A library runs as whoever loads it, and a cache folder may be shared. So a library is loaded only where its folder and
its file belong to this user or to root, nobody else can write to them, and its bytes have the digest that was written
down when it was compiled.
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
    """A library of this user's is not what was compiled there: cut short, or of another build."""


def write_digest(library: Path) -> None:
    """Write down the digest of a library that was just compiled, whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=library.parent, suffix=".sha256.tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(hashlib.sha256(library.read_bytes()).hexdigest())
        os.replace(temporary, digest_path(library))
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def digest_path(library: Path) -> Path:
    """Return where the digest of a library is."""
    return library.with_name(library.name + ".sha256")


def check_folder(folder: Path) -> None:
    """Refuse a folder that somebody else owns or can write to.

    Raises:
        ImportError: it is such a folder, or a link to one.
        OSError: it cannot be looked at.
    """
    _check_owner(os.lstat(folder), folder, stat.S_ISDIR)


def load(library: Path) -> CDLL:
    """Load a library of the cache.

    The file is opened once: what is checked is what is loaded, even if another file takes its place meanwhile.

    Raises:
        DigestError: its bytes are not those that were compiled.
        ImportError: somebody else owns it or can write to it.
        FileNotFoundError, OSError: it is not there, cannot be read, or does not load.
    """
    descriptor = _checked_descriptor(library)
    opened = Path(f"/proc/self/fd/{descriptor}")
    # The descriptor stays open: the loader knows libraries by name, and this name must not come to mean another file.
    return CDLL(str(opened if opened.exists() else library))


def _checked_descriptor(library: Path) -> int:
    check_folder(library.parent)
    wanted = _read(digest_path(library)).decode(errors="replace").strip()
    descriptor = _open(library)
    try:
        with open(os.dup(descriptor), "rb") as file:
            found = hashlib.sha256(file.read()).hexdigest()
        if found != wanted:
            raise DigestError(f"{library} is not the library that was compiled there: its digest is another one")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(path: Path) -> int:
    """Open a regular file of this user's, no link, for reading."""
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
        raise ImportError(f"{path} must be a regular file in a folder of its own, no link or device")
    user = os.geteuid() if hasattr(os, "geteuid") else found.st_uid
    if found.st_uid not in (user, 0) or found.st_mode & WRITABLE_BY_OTHERS:
        raise ImportError(
            f"{path} must belong to user {user} or root and be writable by no one else, got owner {found.st_uid} and "
            f"mode {stat.S_IMODE(found.st_mode):o}; set DYNAXX_CACHE to a folder of your own"
        )
