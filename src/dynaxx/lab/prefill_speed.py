# SPDX-License-Identifier: Apache-2.0
"""Measure the time and peak memory of a whole prefill, dense and sparse in turns."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.machine import synchronize
from dynaxx.lab.validate.result import SpeedRow

FEWEST_PAIRS = 3  # timed dense-sparse pairs per length
LEAST_SECONDS, MOST_SECONDS = 3.0, 15.0  # seconds per length; the second applies while the policy seems too slow
LONG_PAIR = 2.0  # seconds from which a pair needs no warm-up
CLEAR, CLEAR_SECONDS = 1.25, 15.0  # least speed-up and seconds of a pair that needs no second one
SHORT_PAIR = 0.5  # seconds; shorter passes run untimed passes first, to exclude the first call after `apply`


def time_prefill(
    model: Any, ids: Tensor, applied: Callable[[], AbstractContextManager[Any]], slowdown: float
) -> SpeedRow:
    """Time a prompt dense and sparse, until the sparse pass is fast enough or the time is up.

    The fastest runs are compared. A policy that seems too slow is timed for longer, since noise slows short passes by
    more than the few percent that `slowdown` allows.

    Args:
        model: a causal language model of transformers.
        ids: (1, seqlen) int64.
        applied: a function that returns a context within which the model runs sparse.
        slowdown: ratio of sparse to dense seconds up to which no further runs are needed.
    """
    ids = ids.to(model.device)
    dense: list[float] = []
    sparse: list[float] = []
    peaks: dict[int, list[float]] = {id(dense): [], id(sparse): []}
    started, spent, warm, ahead = time.perf_counter(), 0.0, False, 0
    while True:
        for into in (dense, sparse) if len(dense) % 2 == 0 else (sparse, dense):
            seconds, peak = _prefill(model, ids, applied() if into is sparse else contextlib.nullcontext(), ahead)
            into.append(seconds)
            peaks[id(into)] += [peak] if peak is not None else []
        if not warm and dense[0] + sparse[0] < LONG_PAIR:  # the first runs of a length are slower
            ahead = int(dense[0] + sparse[0] < SHORT_PAIR)
            for each in (dense, sparse):
                each.clear()
            started = time.perf_counter()
        warm = True
        spent = time.perf_counter() - started
        enough = len(dense) >= FEWEST_PAIRS or (len(dense) == 2 and spent > MOST_SECONDS)
        enough = enough or (spent > CLEAR_SECONDS and CLEAR * max(sparse, default=1.0) < min(dense, default=0.0))
        if not enough or spent < LEAST_SECONDS:
            continue
        if min(sparse) <= slowdown * min(dense) or spent > MOST_SECONDS:
            break
    before, after = min(dense), min(sparse)
    dense_peak, sparse_peak = (max(peaks[id(each)], default=None) for each in (dense, sparse))
    return SpeedRow(ids.shape[1], before, after, before / after, len(dense), dense_peak, sparse_peak)


@torch.no_grad()
def _prefill(model: Any, ids: Tensor, route: AbstractContextManager[Any], ahead: int) -> tuple[float, float | None]:
    """Time a prefill after some untimed passes. Return the seconds, and the peak memory in MB if known."""
    with route:
        for _ in range(ahead):
            model(ids, use_cache=True, logits_to_keep=1)
        known = _reset_peak(ids.device)
        synchronize(ids.device)
        started = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        synchronize(ids.device)
        seconds = time.perf_counter() - started
    return seconds, _peak_mb(ids.device) if known else None


def _reset_peak(device: torch.device) -> bool:
    """Reset the peak memory. On a CPU, free unused memory and reset the peak of the process, if Linux allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_mb(device: torch.device) -> float | None:
    """Return the peak in MB since `_reset_peak`: of torch's allocator on a GPU, of resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), None)
    return None if kib is None else int(kib) * 1024 / 1e6
