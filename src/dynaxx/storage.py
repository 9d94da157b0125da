# SPDX-License-Identifier: Apache-2.0
"""Read untrusted files with a limit, and write files whole or not at all.

A path can name a pipe that never ends, a device, a file of any size, or a planted link. Readers here accept regular
files up to a size; writers create a new file or folder beside the target, follow no link, and rename it. They lock it
meanwhile, so that the next writer of the target knows what a killed one has left.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from dynaxx.printable import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MAX_DEPTH = 32
MAX_OBJECTS, MAX_LISTS = 1 << 18, 1 << 20

_FLAGS_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_FLAGS_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_FLAGS_BINARY = getattr(os, "O_BINARY", 0)
_LEFTOVER_SECONDS = 24 * 3600  # age from which a temporary file is a leftover where files cannot be locked


def read_regular_file(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes` bytes, without waiting for a writer.

    Raises:
        FileNotFoundError: no such file.
        OSError: not a regular file (a folder, pipe, socket or device), larger than `most_bytes`, or not readable.
            `strerror` says which.
    """
    name = str(Path(path))  # an empty path means the current folder
    try:
        _check_regular(os.stat(name), name)  # before opening, because opening a device can have effects
        descriptor = os.open(name, _FLAGS_READ | _FLAGS_BINARY)
    except ValueError as error:  # a null byte in the name
        raise OSError(errno.EINVAL, str(error), name) from None
    with os.fdopen(descriptor, "rb") as file:
        _check_regular(os.fstat(descriptor), name)  # again, because the file may have been replaced meanwhile
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"must be at most {most_bytes:,} bytes, and is larger", name)
    return content


def write_whole_file(path: str | os.PathLike[str], fill: Callable[[IO[bytes]], object], *, sync: bool = True) -> None:
    """Write a file so that a reader always sees either the whole old content or the whole new content.

    This holds after a crash as well. The new file gets the permissions of the file that it replaces, or those that the
    umask leaves.

    Args:
        path: the file; its folder must exist.
        fill: a function that writes the content to the binary file that it is given.
        sync: flush the content to the disk before the rename; without it a power cut may leave an empty file.

    Raises:
        OSError: the file cannot be written; the old content is untouched. `filename` is `path`.
    """
    target = Path(path)
    if not target.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    try:
        with _temporary_file(target) as (file, temporary):
            _keep_permissions(file.fileno(), target)
            fill(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            if fcntl is None:  # Windows renames closed files only
                file.close()
            os.replace(temporary, target)
    except OSError as error:
        raise _about(target, error) from None
    if sync:
        sync_folder(target.parent)


def check_new_folder(path: Path) -> None:
    """Check that a folder can be made at a path.

    Raises:
        ValueError: the path exists and is not an empty folder.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} already exists: remove it, or choose another folder")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, which becomes `path` in one step at the end, or is removed after an error.

    Its files are flushed to the disk first.

    Raises:
        ValueError: `path` exists and is not an empty folder, or another process made it meanwhile; it is unchanged.
        OSError: the folder cannot be written, for example on a full disk; nothing is left.
    """
    check_new_folder(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path) as temporary:
            yield temporary
            sync_tree(temporary)
            try:
                temporary.rename(path)
            except OSError:
                check_new_folder(path)
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no space left to write {path}; free some, or choose another folder"
            raise OSError(error.errno, message) from error
        raise _about(path, error) from None
    sync_folder(path.parent)


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target` under a name that nobody can predict. It is removed at the end.

    What earlier processes have left of the same target is removed too.

    Raises:
        OSError: the folder cannot be made.
    """
    remove_leftovers(target)
    descriptor = None
    while descriptor is None:
        temporary = _temporary_name(target)
        temporary.mkdir()
        if fcntl is None:  # Windows cannot open folders
            break
        with contextlib.suppress(FileNotFoundError):  # another process took it for a leftover before it was held
            descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            if not _hold(descriptor):
                os.close(descriptor)
                descriptor = None
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def remove_leftovers(target: Path, paths: Iterable[Path] | None = None) -> None:
    """Remove temporary files and folders whose process was killed: those of `target`, or `paths`."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.tmp") if paths is None else paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _FLAGS_READ | getattr(os, "O_NOFOLLOW", 0))
            try:
                if not _is_leftover(descriptor):
                    continue
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _temporary_file(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Yield a new file beside `target`, open for writing, and its path. It is removed unless it was renamed."""
    remove_leftovers(target)
    while True:
        temporary = _temporary_name(target)
        descriptor = os.open(temporary, _FLAGS_NEW | _FLAGS_BINARY, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if not _hold(descriptor):
                continue
            try:
                yield file, temporary
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            return


def _temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")


def _hold(descriptor: int) -> bool:
    """Lock a new file or folder until its descriptor is closed. Return False if another process has removed it."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


def _is_leftover(descriptor: int) -> bool:
    """Return whether no process holds a temporary file or folder, and hold it if so."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    return time.time() - os.fstat(descriptor).st_mtime > _LEFTOVER_SECONDS


def _about(target: Path, error: OSError) -> OSError:
    """Return an error that names the caller's file instead of the temporary one."""
    of_temporary = error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(f".{target.name}.")
    return OSError(error.errno, error.strerror, str(target)) if error.errno is not None and of_temporary else error


def sync_tree(folder: Path) -> None:
    """Flush every file below `folder`, and the folders themselves, to the disk."""
    for base, _, names in os.walk(folder):
        for name in names:
            with open(Path(base) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(base))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def strict_json(value: Any) -> Any:
    """Return plain data with None in place of numbers that are not finite, for which JSON has no form."""
    if isinstance(value, dict):
        return {key: strict_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(
    text: str | bytes,
    *,
    most_depth: int = MAX_DEPTH,
    most_objects: int = MAX_OBJECTS,
    unique: bool = False,
    finite: bool = True,
) -> Any:
    """Parse JSON that may be hostile: deeply nested, full of small objects, or with numbers of thousands of digits.

    Args:
        text: the JSON text.
        most_depth: limit on the nesting depth of objects and lists.
        most_objects: limit on the number of objects; the limit on lists is `MAX_LISTS`.
        unique: refuse an object that gives a name twice.
        finite: refuse NaN and Infinity, which Python's parser accepts. Pass False if the caller checks them and names
            the field.

    Raises:
        ValueError: the text is not JSON or exceeds a limit; the message begins with "is not JSON" or "must".
    """
    try:
        data = json.loads(
            text,
            object_pairs_hook=_unique_names if unique else None,
            parse_constant=_refuse_constant if finite else None,
        )
    except RecursionError:
        raise ValueError(f"must nest at most {most_depth} levels, and is deeper") from None
    except ValueError as error:
        if isinstance(error, _RepeatedNameError):
            raise
        raise ValueError(f"is not JSON: {printable(error, most=200)}") from None
    level, depth, objects, lists = [data], 0, 0, 0
    while level:
        level = [value for value in level if isinstance(value, dict | list)]
        found = sum(isinstance(value, dict) for value in level)
        depth, objects, lists = depth + bool(level), objects + found, lists + len(level) - found
        if depth > most_depth:
            raise ValueError(f"must nest at most {most_depth} levels, and is deeper")
        if objects > most_objects or lists > MAX_LISTS:
            raise ValueError(f"must hold at most {most_objects:,} objects and {MAX_LISTS:,} lists, and holds more")
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class _RepeatedNameError(ValueError):
    """An object gives a name twice."""


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:
            raise _RepeatedNameError(
                f"`{printable(name, most=80)}` must be given once in an object; remove one of the two"
            )
        data[name] = value
    return data


def _check_regular(found: os.stat_result, name: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "must be a regular file, and is a pipe, socket or device", name)


def _keep_permissions(descriptor: int, target: Path) -> None:
    with contextlib.suppress(OSError, AttributeError):  # no such file yet; a system without fchmod
        found = os.lstat(target)
        if stat.S_ISREG(found.st_mode):
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & 0o777)
