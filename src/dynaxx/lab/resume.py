# SPDX-License-Identifier: Apache-2.0
"""Store each finished step of long work on disk, so that a killed run can continue."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from dynaxx import __version__
from dynaxx.core.build import processors
from dynaxx.lab.files import MAX_BYTES, explain_full_disk, write_text
from dynaxx.storage import parse_json, read_regular_file

logger = logging.getLogger("dynaxx")
T = TypeVar("T")

FORMAT = 2  # of a file of steps; 1 was one JSON object, with keys that depended on the version of transformers
NOT_THE_MODEL = ("transformers_version",)  # fields of a configuration; so are those with a leading underscore


def fingerprint(model: nn.Module | None, ids: Tensor, **settings: Any) -> str:
    """Return a short hash of a model (class, configuration and every weight), of token ids or numbers, and settings.

    It does not depend on the version of transformers, on where the model was loaded from, or on buffers that the model
    derives from its configuration.
    """
    settings = {**settings, "dynaxx": __version__}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(_bytes(ids))
    if model is not None:
        config = getattr(model, "config", None)
        facts: dict[str, Any] = config.to_dict() if config is not None else {}
        kept = {key: value for key, value in facts.items() if not (key.startswith("_") or key in NOT_THE_MODEL)}
        digest.update(type(model).__name__.encode() + json.dumps(kept, sort_keys=True, default=str).encode())
        with ThreadPoolExecutor(processors()) as pool:  # hashing releases the GIL
            for found in pool.map(_hash_of, _tensors(model)):
                digest.update(found)
    return digest.hexdigest()[:16]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and stored buffers by name, shared ones once."""
    yield from model.named_parameters()
    stored = model.state_dict(keep_vars=True).keys()
    yield from (named for named in model.named_buffers() if named[0] in stored)


def _hash_of(named: tuple[str, Tensor]) -> bytes:
    name, tensor = named
    head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + hashlib.sha256(_bytes(tensor)).digest()).digest()


def _bytes(tensor: Tensor) -> Any:
    """Return a tensor's values as bytes, without a copy."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return (flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)).numpy()


class Steps:
    """Results of finished steps by name, in a file of JSON lines to which each step adds one, or in memory alone.

    The first line has the format and the fingerprint. A file of another format or fingerprint (another model, text or
    setting) is logged and replaced. So is everything from the first line on that is cut off or was modified.
    """

    def __init__(self, path: Path | None, key: str = "", resume: bool = True) -> None:
        self._path, self._key = path, key
        self._results: dict[str, Any] = {}
        self._whole = False  # whether the file ends with a whole line, so that another may follow
        self.seconds = 0.0  # seconds of earlier runs
        self._since = time.monotonic()
        if resume and path is not None:
            self._load(path)

    def _load(self, path: Path) -> None:
        older = path.with_suffix(".json")
        if not path.exists():
            if older != path and older.exists():
                logger.warning("%s was written by another version of dynaxx; starting over", older)
            return
        try:
            text = read_regular_file(path, MAX_BYTES).decode()
            head, *lines = text.split("\n")
            found = parse_json(head)
            if found["format"] != FORMAT:
                raise ValueError(f"format {FORMAT} is expected")
            key = found["key"]
        except (ValueError, KeyError, TypeError, OSError):
            logger.warning("%s cannot be read, or is of another version of dynaxx; starting over", path)
            return
        if key != self._key:
            logger.warning("%s belongs to another model, text or setting; starting over", path)
            return
        for index, line in enumerate(lines):
            if index == len(lines) - 1 and not line:
                self._whole = True
                break
            try:
                step = parse_json(line)
                if step["digest"] != _digest(self._key, step["name"], step["seconds"], step["result"]):
                    raise ValueError("changed since it was written")
                self._results[step["name"]], self.seconds = step["result"], float(step["seconds"])
            except (ValueError, KeyError, TypeError):
                logger.warning("%s cannot be read from line %d on; going on from there", path, index + 2)
                break

    def __contains__(self, name: str) -> bool:
        """Return whether a step has a result."""
        return name in self._results

    def get(self, name: str) -> Any:
        """Return the JSON result of a step, or None."""
        return self._results.get(name)

    def names(self, start: str) -> list[str]:
        """Return the names of the stored steps that begin like this, in their order."""
        return [name for name in self._results if name.startswith(start)]

    def remember(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON result of a step from the file, or compute and store it."""
        if name not in self._results:
            self.store(name, compute())
        return self._results[name]

    def remember_as(self, kind: type[T], name: str, compute: Callable[[], T]) -> T:
        """Return the result of a step as an object of a type, from the file, or compute and store it."""
        form = TypeAdapter(kind)
        return form.validate_python(self.remember(name, lambda: form.dump_python(compute(), mode="json")))

    def store(self, name: str, result: Any) -> None:
        """Store the JSON result of a step, in place of an earlier one."""
        self._results[name] = result
        if self._path is None:
            return
        if self._whole:
            self._append(self._path, self._line(name).encode())
        else:
            head = json.dumps({"format": FORMAT, "key": self._key}) + "\n"
            write_text(self._path, head + "".join(self._line(each) for each in self._results))
            self._whole = True

    def _append(self, path: Path, line: bytes) -> None:
        """Add a line, or nothing and raise OSError: then the next step writes the file anew, with this one."""
        self._whole = False
        with explain_full_disk(path), path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise
        self._whole = True

    def _line(self, name: str) -> str:
        """Return the line of a step."""
        spent, result = round(self.seconds + time.monotonic() - self._since, 3), self._results[name]
        step = {"name": name, "seconds": spent, "digest": _digest(self._key, name, spent, result), "result": result}
        return json.dumps(step, allow_nan=False) + "\n"


def _digest(key: str, name: str, seconds: float, result: Any) -> str:
    text = json.dumps([key, name, seconds, result], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
