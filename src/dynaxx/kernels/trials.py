# SPDX-License-Identifier: Apache-2.0
"""Versions of Triton whose kernels were proven, and trials of all others against the oracle.

With a version outside `PROVEN`, a kind of kernel is tried when it is first asked for: another process compiles it, runs
it on a small problem and compares it with fp64, so that a crash or a hang there harms nothing here. The verdict is kept
on disk by versions, GPU and the source of the kernels. A kind that fails is refused with the reason, and the next
backend serves.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dynaxx.storage import parse_json, read_regular_file, write_whole_file

PROVEN = ("3.6", "3.7", "3.8", "3.9")  # the GPU tests of the kernels passed on an H200: benchmarks/runs
INSIDE = "DYNAXX_TRIAL"  # set in the process of a trial, which uses kernels and launchers untried
MAX_SECONDS = 300.0  # of one trial, most of which compiles
MAX_BYTES = 1 << 16
FULL = re.compile("out of memory|OutOfMemory|ALLOC_FAILED")  # what PyTorch, CUDA and its libraries say of full memory
DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")


class Tried(NamedTuple):
    """How the kernels of an operation are tried."""

    fields: tuple[str, ...]  # of a problem, which distinguish kernels
    backends: tuple[str, ...]  # that are tried
    worker: str = (
        f"{__name__.partition('.')[0]}.lab.doctor.trial"  # module that runs a trial; kernel packages have none
    )


# Operations whose kernels are tried. Trained sparse attention adds its own.
TRIED = {
    "attention": Tried(
        ("dtype", "head_dim", "head_dim_v", "block_size", "group_size", "softcap", "needs_grad"), ("hopper", "triton")
    ),
    "scores of one query per row": Tried(("dtype", "head_dim", "kv_block"), ("hopper",)),
}
LAUNCHES = ("attention", "triton", ("float16", 64, 64, (64, 64), 2, False, False))  # a kind that proves launchers

Kind = tuple[str, str, tuple[Any, ...]]  # operation, backend, values of `Tried.fields`

logger = logging.getLogger("dynaxx")


@lru_cache(maxsize=1)
def triton_version() -> str | None:
    """Return the version of the installed Triton, without loading it; None if it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@lru_cache(maxsize=1)
def is_proven() -> bool:
    """Return whether the installed Triton is proven, or this process tries kernels."""
    return ".".join((triton_version() or "").split(".")[:2]) in PROVEN or INSIDE in os.environ


def reasons(operation: str, backend: str, problem: Any) -> list[str]:
    """Return why an unproven Triton may not serve a problem on a GPU; empty if it may."""
    tried = TRIED.get(operation)
    if tried is None or backend not in tried.backends or is_proven() or problem.device.type != "cuda":
        return []
    values = tuple(_plain(name, getattr(problem, name)) for name in tried.fields)
    reason = verdict((operation, backend, values), problem.device.index or 0)
    return [f"triton {triton_version()} is not a proven version, and {reason}"] if reason else []


def launches_directly() -> bool:
    """Return whether kernels are launched below Triton's Python: with proven versions, and those that pass a trial."""
    return is_proven() or not verdict(LAUNCHES, torch.cuda.current_device() if torch.cuda.is_available() else -1)


def _plain(name: str, value: Any) -> Any:
    """Return the value of a field as JSON has it; of a softcap, whether there is one."""
    if name == "softcap":
        return value is not None
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


@lru_cache(maxsize=256)
def verdict(kind: Kind, index: int) -> str:
    """Return why a kind of kernel must not be used on a GPU, "" if it may be: as stored, or after a trial."""
    if index < 0:
        return "there is no GPU to try it on"
    path = _file(kind, index)
    stored = _stored(path, kind)
    if stored is not None:
        return stored
    start = time.monotonic()
    reason, is_final = _try(kind, index)
    outcome = f"are not used, because {reason}" if reason else "are used"
    logger.warning("triton %s is not a proven version; kernels for %s were tried against the oracle in %.0f s and %s",
                   triton_version(), _words(kind), time.monotonic() - start, outcome)  # fmt: skip
    if is_final and path is not None:
        _store(path, kind, reason)
    return reason


def _words(kind: Kind) -> str:
    operation, backend, values = kind
    fields = ", ".join(f"{name} {value}" for name, value in zip(TRIED[operation].fields, values, strict=True))
    return f"{operation} on {backend} ({fields})"


def _try(kind: Kind, index: int) -> tuple[str, bool]:
    """Run a trial in another process; return the reason against the kind, and whether that is a finding."""
    command = [sys.executable, "-P", "-m", TRIED[kind[0]].worker, json.dumps([*kind, index])]
    environment = {**os.environ, INSIDE: "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return f"its trial did not end within {MAX_SECONDS:.0f} s", False
    except OSError as error:
        return f"its trial could not start: {error}", False
    try:
        return str(parse_json(done.stdout.splitlines()[-1].encode())["reason"]), True
    except (ValueError, LookupError, TypeError):
        return _without_finding(done.stderr, done.returncode), False


def _without_finding(stderr: str, code: int) -> str:
    """Return why a trial ended without a finding: its error, which lines of advice may follow."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    said = (errors or lines or [f"exit code {code}"])[-1][:300]
    if FULL.search(said):
        return f"the GPU had no memory left for its trial, which the next process makes again ({said})"
    return f"its trial ended with: {said}"


def _file(kind: Kind, index: int) -> Path | None:
    """Return the file of a verdict; None for a user without a cache folder."""
    from dynaxx.core.library import cache_directory

    machine = f"{torch.cuda.get_device_name(index)}-triton{triton_version()}-torch{torch.__version__}"
    folder = re.sub("[^A-Za-z0-9.]+", "-", f"{machine}-{_source_hash()}")
    try:
        name = hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:16]
        return cache_directory() / "trials" / folder / f"{name}.json"
    except RuntimeError:
        return None


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Return a hash of the source of all kernels, which lie in folders named like this one."""
    found = hashlib.sha256()
    here = Path(__file__).parent
    folder = here.parent
    for path in sorted(path for path in folder.glob(f"**/{here.name}/**/*") if path.suffix in (".py", ".c")):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _stored(path: Path | None, kind: Kind) -> str | None:
    """Return the stored verdict; None if there is none that can be read."""
    try:
        stored = parse_json(read_regular_file(path, MAX_BYTES)) if path is not None else {}
        if isinstance(stored["reason"], str) and stored["kind"] == json.loads(json.dumps(kind)):
            return stored["reason"]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None


def _store(path: Path, kind: Kind, reason: str) -> None:
    """Keep a verdict for later processes, if its folder can be written."""
    text = json.dumps({"kind": kind, "reason": reason, "triton": triton_version()}) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole_file(path, lambda file: file.write(text.encode()))
    except OSError as error:
        logger.info("the verdict of a trial is not kept: %s", error)
