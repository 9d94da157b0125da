# SPDX-License-Identifier: Apache-2.0
"""Tile sizes found by `dynaxx.autotune`, stored on disk by device and versions, and read once per process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

import dynaxx
from dynaxx.forks import LockFile
from dynaxx.kernels.device import Gpu
from dynaxx.storage import parse_json, read_regular_file, write_whole_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MAX_BYTES = 1 << 20

Values = tuple[int | None, ...]  # the fields of `config.TileSizes`


def kind_of_launch(
    kernel: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, block_size: tuple[int, int], tma: bool
) -> str:
    """Return the key under which tiles of a launch are stored, without the GPU."""
    return f"{kernel} {dtype} {head_dim}/{head_dim_v} {block_size[0]}x{block_size[1]}{' tma' if tma else ''}"


def tuned_values(kind: str, gpu: Gpu) -> Values | None:
    """Return the tuned values for a kind of launch; None if there are none."""
    return _stored(gpu).get(kind) if gpu.vendor != "interpreter" else None


def keep(kind: str, gpu: Gpu, values: Values | None, store: bool = True) -> None:
    """Use these tiles from now on; None restores the defaults. With `store`, also save them for later processes.

    Raises:
        OSError: the file cannot be written; nothing on disk was changed.
    """
    _change(_stored(gpu), kind, values)
    if store:
        path = tuned_file(gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            stored = _read(path)
            _change(stored, kind, values)
            text = json.dumps(stored, indent=1, sort_keys=True) + "\n"
            write_whole_file(path, lambda file: file.write(text.encode()))


def _change(known: dict[str, Values], kind: str, values: Values | None) -> None:
    known.pop(kind, None)
    if values is not None:
        known[kind] = values


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time change files of a folder, so that none loses what another has stored meanwhile."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    file = LockFile(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        file.close()


def tuned_file(gpu: Gpu) -> Path:
    """Return the file for this GPU's tiles; it also depends on the versions of Triton and dynaxx."""
    import triton

    from dynaxx.core.library import cache_directory

    name = f"{gpu.name}-triton{triton.__version__}-dynaxx{dynaxx.__version__}"
    return cache_directory() / "tiles" / f"{re.sub('[^A-Za-z0-9.]+', '-', name)}.json"


@lru_cache(maxsize=16)
def _stored(gpu: Gpu) -> dict[str, Values]:
    try:
        return _read(tuned_file(gpu))
    except RuntimeError:  # a user without a home folder has no cache folder
        return {}


def _read(path: Path) -> dict[str, Values]:
    """Read the file; if it is unreadable, warn and treat it as empty."""
    if not path.exists():
        return {}
    try:
        stored = parse_json(read_regular_file(path, MAX_BYTES))
        found = {str(kind): tuple(values) for kind, values in stored.items()}
        if all(_plausible(values) for values in found.values()):
            return found
        reason = "it contains invalid tile sizes"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        reason = str(error)
    logging.getLogger("dynaxx").warning("%s is ignored: %s", path, reason)
    return {}


def _plausible(values: Values) -> bool:
    power = lambda size: isinstance(size, int) and size > 0 and size & (size - 1) == 0
    return len(values) == 5 and all(map(power, values[:3])) and values[3] in range(1, 9)
