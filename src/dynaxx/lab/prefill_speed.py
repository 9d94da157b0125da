# SPDX-License-Identifier: Apache-2.0
"""Measure the time and peak memory of a whole prefill, dense and sparse in turns."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.machine import synchronize, watch_others
from dynaxx.lab.time_budget import TimeBudget
from dynaxx.lab.validate.result import PAIRS_TO_FAIL, SpeedRow

MIN_PAIRS = 3  # timed dense-sparse pairs per length
MIN_SECONDS, MAX_SECONDS = 3.0, 15.0  # seconds per length; the second applies while the pairs do not decide
SLOW_SECONDS = 60.0  # seconds until which a length that seems slow gets the pairs that a failure needs
CLEAR, CLEAR_SECONDS = 1.25, 15.0  # least speed-up and seconds of a pair that needs no second one
LONG_PAIR = 2.0  # seconds from which a pair needs no warm-up
SHORT_PAIR = 0.5  # seconds; shorter passes run untimed passes first, to exclude the first call after `apply`


class _Pass(NamedTuple):
    seconds: float
    cpu_seconds: float | None  # of all threads of this process; None on a GPU
    peak_mb: float | None


def time_prefill(
    model: Any,
    ids: Tensor,
    applied: Callable[[], AbstractContextManager[Any]],
    slowdown: float,
    budget: TimeBudget | None = None,
) -> SpeedRow:
    """Time a prompt dense and sparse in turns, until the pairs decide whether it is too slow, or the time is up.

    The two runs of a pair follow each other and meet the same machine. The pair of median speed-up is the result, and
    the interval comes from all of them.

    Args:
        model: a causal language model of transformers.
        ids: (1, seqlen) int64.
        applied: a function that returns a context within which the model runs sparse.
        slowdown: largest ratio of sparse to dense seconds that passes.
        budget: the time budget; one pair is timed in any case.
    """
    ids = ids.to(model.device)
    dense: list[_Pass] = []
    sparse: list[_Pass] = []
    busy, started, warm, ahead = watch_others(), time.perf_counter(), False, 0
    while True:
        for into in (dense, sparse) if len(dense) % 2 == 0 else (sparse, dense):
            into.append(_prefill(model, ids, applied() if into is sparse else contextlib.nullcontext(), ahead))
        if not warm and (pair := dense[0].seconds + sparse[0].seconds) < LONG_PAIR:
            ahead, started = int(pair < SHORT_PAIR), time.perf_counter()
            dense.clear()  # the first runs of a length are slower and do not count
            sparse.clear()
        warm = True
        if dense:
            row = _row(ids.shape[1], dense, sparse, busy())
            late = budget is not None and not budget.allows(dense[-1].seconds + sparse[-1].seconds)
            if late or _is_enough(row, time.perf_counter() - started, slowdown):
                return row


def _is_enough(row: SpeedRow, spent: float, slowdown: float) -> bool:
    """Return whether the pairs decide, or have taken long enough."""
    if spent > CLEAR_SECONDS and row.speedup > CLEAR:
        return True
    if spent > MAX_SECONDS:
        return row.pairs >= 2 and (row.high > 1 or row.pairs >= PAIRS_TO_FAIL or spent > SLOW_SECONDS)
    return row.pairs >= MIN_PAIRS and spent >= MIN_SECONDS and row.against(slowdown) != "unclear"


def _row(seqlen: int, dense: list[_Pass], sparse: list[_Pass], busy: bool) -> SpeedRow:
    """Return the pair of median speed-up, its interval, and the least CPU time."""
    pairs = sorted(zip(dense, sparse, strict=True), key=lambda pair: pair[0].seconds / pair[1].seconds)
    before, after = (run.seconds for run in pairs[(len(pairs) - 1) // 2])
    low, high = interval([a.seconds / b.seconds for a, b in pairs])
    known = lambda runs, name: [value for run in runs if (value := getattr(run, name)) is not None]
    cpu = [min(known(runs, "cpu_seconds"), default=None) for runs in (dense, sparse)]
    peaks = [max(known(runs, "peak_mb"), default=None) for runs in (dense, sparse)]
    memory, speedup = (peaks[0], peaks[1]), before / after
    return SpeedRow(seqlen, before, after, speedup, len(pairs), *memory, low, high, cpu[0], cpu[1], busy)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the ratios around the median that hold it with 95 % probability; all of them if there are fewer than six.

    It follows from ranks alone, so that single disturbed pairs do not widen it.
    """
    ordered, count, outside, rank = sorted(ratios), len(ratios), 0.0, 0
    while 2 * (outside := outside + math.comb(count, rank) / 2**count) <= 0.05:
        rank += 1
    rank = max(0, rank - 1)
    return ordered[rank], ordered[-1 - rank]


@torch.no_grad()
def _prefill(model: Any, ids: Tensor, route: AbstractContextManager[Any], ahead: int) -> _Pass:
    """Time a prefill after some untimed passes."""
    with route:
        for _ in range(ahead):
            model(ids, use_cache=True, logits_to_keep=1)
        known = _reset_peak(ids.device)
        synchronize(ids.device)
        started, cpu = time.perf_counter(), time.process_time()
        model(ids, use_cache=True, logits_to_keep=1)
        synchronize(ids.device)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    used = cpu if ids.device.type == "cpu" else None
    return _Pass(seconds, used, _peak_mb(ids.device) if known else None)


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
