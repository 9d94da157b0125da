# SPDX-License-Identifier: Apache-2.0
"""List and clear dynaxx's cache folder. dynaxx recreates its content when it needs it."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dynaxx.core.library import cache_directory
from dynaxx.lab.results import Result

KINDS = {
    r"core|(core|onnx)-[0-9a-f]+": "compiled CPU core",
    r"models": "converted GGUF models",
    r"gguf": "joined GGUF files",
    r"tiles": "tile sizes found by autotuning",
}  # by folder name; `clean_cache` leaves everything else in the cache folder


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache."""

    path: Path
    what: str
    bytes: int


@dataclass(frozen=True)
class CacheReport(Result):
    """The content of the cache, or what was removed from it."""

    derived = ("bytes",)

    folder: Path
    entries: tuple[CacheEntry, ...]
    removed: bool

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.bytes for entry in self.entries)

    def summary(self) -> str:
        """Return what the command prints."""
        lines = [f"{each.bytes / 1e6:10,.1f} MB  {each.path.name}  ({each.what})" for each in self.entries]
        done = "removed" if self.removed else "in"
        return "\n".join([*lines, f"{self.bytes / 1e6:10,.1f} MB {done} {self.folder}"])


def read_cache() -> CacheReport:
    """Return the content of the cache folder.

    Raises:
        OSError: the folder cannot be read.
    """
    folder = cache_directory()
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        what = next((words for name, words in KINDS.items() if re.fullmatch(name, path.name)), None)
        if what is not None and path.is_dir() and not path.is_symlink():
            found.append(CacheEntry(path, what, _bytes_below(path)))
    return CacheReport(folder, tuple(found), removed=False)


def clean_cache() -> CacheReport:
    """Remove dynaxx's files from the cache folder, and return what was removed. Links are not followed.

    Raises:
        OSError: something cannot be removed.
    """
    found = read_cache()
    for entry in found.entries:
        shutil.rmtree(entry.path)
    return CacheReport(found.folder, found.entries, removed=True)


def _bytes_below(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except FileNotFoundError:  # another process removed or renamed it
                continue
    return total
