"""Counting what calls did: the one place through which every outcome of a layer call goes, to `stats` and telemetry."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dynaxx.policy.guard import failure_reason
from dynaxx.telemetry import Recorder
from dynaxx.telemetry.probe import Call, Probe

logger = logging.getLogger("dynaxx")


class Counts:
    """Layer calls by outcome, since the start or `reset`. Safe to use from several threads.

    Attributes:
        probe: measures sparse calls, see there.
    """

    def __init__(self, numbers: Recorder) -> None:
        self.numbers = numbers
        self.probe = Probe(numbers)
        self._lock = threading.Lock()
        self._sparse = 0
        self._dense: Counter[str] = Counter()
        self._sequences: Counter[str] = Counter()
        self._compiled: dict[str, int] = {}
        self._count_dense: dict[tuple[str, str], Callable[[int], None]] = {}  # by reason and phase, in telemetry
        self._said: set[str] = set()

    def sparse(self, layer: int) -> None:
        """A call had at least one sparse sequence."""
        with self._lock:
            self._sparse += 1

    def decoding(self, layer: int, q: Tensor) -> Call:
        """A decoding step of a layer begins; `decoded` when it ran. It is counted as a sparse call, too."""
        return self.probe.start(layer, q, phase="decode")

    def decoded(self, call: Call, q: Tensor) -> None:
        """It ran by its budget; its choice of pages is part of its time."""
        call.done(q, q, backend="triton" if q.device.type == "cuda" else "cpu")

    def dense(self, layer: int, reason: str, phase: str = "prefill") -> None:
        """A whole call went the old way."""
        self.dense_calls(1, reason, phase)

    def dense_calls(self, calls: int, reason: str, phase: str = "prefill") -> None:
        """So many whole calls went the old way."""
        with self._lock:
            self._dense[reason] += calls
        count = self._count_dense.get((reason, phase))
        if count is None:
            count = self._count_dense[reason, phase] = self.probe.dense_counter(reason, phase)
        count(calls)

    def fallback(self, layer: int, reason: str, phase: str = "prefill") -> None:
        """A whole call went the old way that should have been sparse."""
        with self._lock:
            self._dense[reason] += 1
        self.probe.fallback(reason, phase)

    def failed(self, layer: int, error: Exception, phase: str = "prefill") -> None:
        """A sparse call failed, and goes the old way. The first failure of each kind is told with its traceback."""
        event = failure_reason(error)
        self.fallback(layer, event.replace("_", " "), phase)
        self.numbers.event(event, layer=layer)
        kind = f"{event} {type(error).__name__}"
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(
                "layer %d: sparse attention failed (%s), the call ran dense; said once: %s",
                layer,
                event.replace("_", " "),
                error,
                exc_info=error,
            )

    def dense_sequences(self, layer: int, reason: str, sequences: int) -> None:
        """So many sequences of a call that is sparse otherwise were dense."""
        with self._lock:
            self._sequences[reason] += sequences

    def compiled(self) -> None:
        """A compiled model ran a layer, dense. Traced by torch.compile: no lock."""
        self._compiled["torch.compile"] = self._compiled.get("torch.compile", 0) + 1

    def reset(self) -> None:
        """Start from zero."""
        with self._lock:
            self._sparse = 0
            self._dense.clear()
            self._sequences.clear()
            self._compiled.clear()

    def to_dict(self) -> dict[str, Any]:
        """As `Handle.stats`."""
        with self._lock:
            return {
                "sparse_calls": self._sparse,
                "dense_calls": {**self._dense, **self._compiled},
                "dense_sequences": dict(self._sequences),
            }
