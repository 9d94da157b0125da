# SPDX-License-Identifier: Apache-2.0
"""Store each finished step of long work on disk, so that a killed run can continue."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx import __version__
from dynaxx.lab.files import read_json, write_json

logger = logging.getLogger("dynaxx")


def fingerprint(model: nn.Module | None, ids: Tensor, **settings: Any) -> str:
    """Return a short hash of a model (class, configuration and every weight), of token ids or numbers, and settings."""
    settings = {**settings, "dynaxx": __version__}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(_bytes(ids))
    if model is not None:
        config = getattr(model, "config", None)
        facts: dict[str, Any] = config.to_dict() if config is not None else {}
        kept = {
            key: value for key, value in facts.items() if not key.startswith("_")
        }  # without the path that it was loaded from
        digest.update(type(model).__name__.encode() + json.dumps(kept, sort_keys=True, default=str).encode())
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the GIL
            for found in pool.map(_hash_of, _tensors(model)):
                digest.update(found)
    return digest.hexdigest()[:16]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name, shared ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _hash_of(named: tuple[str, Tensor]) -> bytes:
    name, tensor = named
    head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + hashlib.sha256(_bytes(tensor)).digest()).digest()


def _bytes(tensor: Tensor) -> Any:
    """Return a tensor's values as bytes, without a copy."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return (flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)).numpy()


class Steps:
    """Results of finished steps by name, in a JSON file that is always whole.

    A file with another fingerprint (another model, text or setting), or that is broken or was modified, is logged and
    replaced.
    """

    def __init__(self, path: Path, key: str, resume: bool = True) -> None:
        self._path, self._key = path, key
        self._results: dict[str, Any] = {}
        self.seconds = 0.0  # seconds of earlier runs
        self._since = time.monotonic()
        if resume and path.exists():
            self._load()

    def _load(self) -> None:
        try:
            found = read_json(self._path)
            if found["key"] != self._key:
                logger.warning("%s belongs to another model, text or setting; starting over", self._path)
                return
            if found["digest"] != _digest(self._key, found["seconds"], found["results"]):
                raise ValueError("changed since it was written")
            self._results, self.seconds = dict(found["results"]), float(found["seconds"])
        except (ValueError, KeyError, TypeError, OSError):
            logger.warning("%s cannot be read; starting over", self._path)

    def __contains__(self, name: str) -> bool:
        """Return whether a step has a result."""
        return name in self._results

    def remember(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON result of a step from the file, or compute and store it."""
        if name not in self._results:
            self._results[name] = compute()
            spent = self.seconds + time.monotonic() - self._since
            kept = {"key": self._key, "seconds": spent, "results": self._results}
            write_json(self._path, {**kept, "digest": _digest(self._key, spent, self._results)})
        return self._results[name]


def _digest(key: str, seconds: float, results: dict[str, Any]) -> str:
    text = json.dumps([key, seconds, results], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
