# SPDX-License-Identifier: Apache-2.0
"""Count the outcomes of layer calls. Every outcome passes through this module, to `stats` and to telemetry."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dynaxx.forks import new_lock
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.policy.guard import failure_reason
from dynaxx.telemetry import Recorder
from dynaxx.telemetry.probe import Call, Probe

logger = logging.getLogger("dynaxx")


class Counts:
    """Layer calls by outcome, since the start or `reset`. Safe to use from several threads.

    Args:
        numbers: the recorder for telemetry.

    Attributes:
        probe: measures sparse calls, see `Probe`.
    """

    def __init__(self, numbers: Recorder) -> None:
        self.numbers = numbers
        self.probe = Probe(numbers)
        self._lock = new_lock()
        self._sparse = self._own_pattern = 0
        self._count_own_pattern: dict[str, Callable[[int], None]] = {}
        self._dense: Counter[DenseReason] = Counter()
        self._sequences: Counter[DenseReason] = Counter()
        self._count_dense: dict[tuple[DenseReason, str], Callable[[int], None]] = {}  # telemetry counters
        self._count_steps: dict[str, Callable[[], None]] = {}  # telemetry counters by backend
        self._logged: set[str] = set()

    def sparse(self, calls: int = 1) -> None:
        """Count calls with at least one sparse sequence."""
        with self._lock:
            self._sparse += calls

    def own_pattern(self, phase: str = "prefill", calls: int = 1) -> None:
        """Count calls that ran the model's own pattern on dynaxx's kernels."""
        with self._lock:
            self._own_pattern += calls
        count = self._count_own_pattern.get(phase)
        if count is None:
            labels = {"backend": "own_pattern", "phase": phase}
            count = self._count_own_pattern[phase] = self.numbers.counter("dynaxx_layer_calls_total", **labels)
        count(calls)

    def decoding(self, layer: int, q: Tensor, *, measured: bool = False) -> Call:
        """Begin a decoding step of a layer, which counts as a sparse call. Call `decoded` when it ran.

        Args:
            layer: index of the layer.
            q: (batch, q_heads, seqlen_q, head_dim).
            measured: whether the probe said already that it wants this call.
        """
        return self.probe.measured(layer, q, "decode") if measured else self.probe.start(layer, q, phase="decode")

    def decoded(self, call: Call, q: Tensor) -> None:
        """End a decoding step. Its time includes the choice of pages."""
        call.done(q, q, backend="triton" if q.device.type == "cuda" else "cpu")

    def decode_steps(self, backend: str) -> None:
        """Count a decoding step that may be replayed from a CUDA graph. It is not timed."""
        with self._lock:
            self._sparse += 1
        count = self._count_steps.get(backend)
        if count is None:
            count = self.numbers.counter("dynaxx_layer_calls_total", backend=backend, phase="decode")
            self._count_steps[backend] = count
        count()

    def dense(self, reason: DenseReason, phase: str = "prefill", calls: int = 1) -> None:
        """Count whole calls that ran dense."""
        with self._lock:
            self._dense[reason] += calls
        if reason.is_fallback:
            for _ in range(calls):
                self.probe.fallback(reason.value, phase)
            return
        count = self._count_dense.get((reason, phase))
        if count is None:
            count = self._count_dense[reason, phase] = self.probe.dense_counter(reason.value, phase)
        count(calls)

    def failed(self, layer: int, error: Exception, phase: str = "prefill") -> None:
        """Count a call that runs dense because a kernel failed. Log each kind of failure once, with its traceback."""
        event = failure_reason(error)
        self.dense(DenseReason.of(event.replace("_", " ")), phase)
        self.numbers.event(event, layer=layer)
        kind = f"{event} {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "layer %d: sparse attention failed (%s), the call ran dense; logged once: %s",
                layer,
                event.replace("_", " "),
                error,
                exc_info=error,
            )

    def not_decided(self, layer: int, error: Exception) -> None:
        """Count a call that runs dense because routing raised an error. Log each kind of error once."""
        self.dense(DenseReason.NOT_DECIDED)
        kind = f"routing {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("layer %d: routing failed, the call ran dense; logged once", layer, exc_info=error)

    def dense_sequences(self, reason: DenseReason, sequences: int) -> None:
        """Count sequences that ran dense in a call with sparse sequences."""
        with self._lock:
            self._sequences[reason] += sequences

    def reset(self) -> None:
        """Start from zero."""
        with self._lock:
            self._sparse = self._own_pattern = 0
            self._dense.clear()
            self._sequences.clear()

    def to_dict(self) -> dict[str, Any]:
        """Return the counts in the form of `Handle.stats`."""
        with self._lock:
            return {
                "sparse_calls": self._sparse,
                "own_pattern_calls": self._own_pattern,
                "dense_calls": _by_text(self._dense),
                "dense_sequences": _by_text(self._sequences),
            }


def _by_text(counter: Counter[DenseReason]) -> dict[str, int]:
    return {reason.value: count for reason, count in counter.items()}
