# SPDX-License-Identifier: Apache-2.0
"""`Probe`: integrations call it around each attention call of a layer. It counts every call and measures a few.

A measured call is timed by events on a GPU and by the clock on a CPU, and the blocks of its layout are counted on its
device. The probe never waits for the GPU: later calls and readers collect the results.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.registry import ATTENTION
from dynaxx.layout import BlockLayout
from dynaxx.ops.checks import check_inputs
from dynaxx.telemetry.recorder import Recorder, recorder
from dynaxx.telemetry.samples import HOST_CLOCK, Clock, HostSlots, Sample, clock_of, count_blocks

SAMPLE_RATE = 1 / 32
SPACING = 0.2  # smallest time in seconds between measured calls; one takes up to 0.5 ms of the host, 0.3 % of it
OVERLAP_EVERY = 16  # one in so many measured calls, starting with the first, compares neighbouring selections
MAX_PENDING = 64
TOGETHER = 8  # measurements on a GPU that are recorded together, unless metrics are read before


class CallCounters(NamedTuple):
    """The counters of one kind of call."""

    backend: str
    count_one: Callable[..., None]


class Probe:
    """Measure the sparse calls of one model. One probe may serve all layers, from any thread.

    Args:
        numbers: the recorder; the process's recorder by default. `recorder().bind(model_name=...)` names the model.
        sample_rate: share of calls that are measured. 0 measures none; all calls are counted either way.
        spacing: smallest time in seconds between two measured calls, and between two timed passes.
    """

    def __init__(
        self, numbers: Recorder | None = None, *, sample_rate: float = SAMPLE_RATE, spacing: float = SPACING
    ) -> None:
        if not 0 <= sample_rate <= 1:
            raise ValueError(f"`sample_rate` must be between 0 and 1, got {sample_rate}")
        self.numbers = recorder() if numbers is None else numbers
        self.sample_rate, self.spacing = sample_rate, spacing
        self._pending: deque[Sample | RequestTimer] = deque()
        self._random = random.Random(0)
        self._last = self._last_request = -spacing
        self._measured = 0
        self._known: dict[tuple[Any, ...], CallCounters] = {}
        self._requests: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {}
        self._slots = HostSlots(2 * MAX_PENDING)
        self.numbers.add_source(self)

    def start(self, layer: int, q: Tensor, *, phase: str = "prefill") -> Call:
        """Begin a sparse call, before its blocks are chosen. q has shape (batch, seqlen_q, q_heads, head_dim)."""
        return self.measured(layer, q, phase) if self.wants(q.device) else Call(self, layer, q, phase)

    def wants(self, device: torch.device) -> bool:
        """Return whether to measure the next call. `start` asks; callers that know the backend may ask and count."""
        if self.sample_rate and (not self._measured or self._random.random() < self.sample_rate):  # measure the first
            now = time.monotonic()
            if now - self._last >= self.spacing and clock_of(device) is not None and self._has_room():
                self._last = now
                return True
        return False

    def may_want(self) -> bool:
        """Return whether `wants` may say yes within less than `spacing` from now."""
        return bool(self.sample_rate) and (not self._measured or time.monotonic() - self._last >= self.spacing)

    def measured(self, layer: int, q: Tensor, phase: str = "prefill") -> MeasuredCall:
        """Begin a call that is measured, if `wants` said so."""
        clock = clock_of(q.device)
        assert clock is not None, "`wants` asked for it"
        return MeasuredCall(self, layer, q, phase, clock)

    def counter(self, backend: str, phase: str = "prefill") -> Callable[..., None]:
        """Return the function that counts one call of a backend that is not measured, or a given number."""
        return self._backend_calls(backend, phase).count_one

    def dense(self, reason: str, phase: str = "prefill") -> None:
        """Count a call that ran dense."""
        self.dense_counter(reason, phase)(1)

    def dense_counter(self, reason: str, phase: str = "prefill") -> Callable[[int], None]:
        """Return a function that counts dense calls. It is faster than `dense` for frequent calls."""
        calls = self.numbers.counter("dynaxx_layer_calls_total", backend="dense", phase=phase)
        reasons = self.numbers.counter("dynaxx_dense_calls_total", reason=reason)

        def count(number: int) -> None:
            calls(number)
            reasons(number)

        return count

    def fallback(self, reason: str, phase: str = "prefill") -> None:
        """Count a call that should have run sparse but ran dense."""
        self.dense(reason, phase)
        self.numbers.add("dynaxx_fallbacks_total", reason=reason)

    def request(self, route: str, tokens: int, device: torch.device) -> RequestTimer:
        """Begin a forward pass over `tokens` tokens of prompts. Call `done()` on the result when it ends.

        Every pass is counted. Passes are timed at most once per `spacing`.
        """
        now, clock = time.monotonic(), None
        if now - self._last_request >= self.spacing and self._has_room():
            self._last_request, clock = now, clock_of(device)
        return RequestTimer(self, route, tokens, clock)

    def request_counters(self, route: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the functions that count requests and their tokens on a route."""
        known = self._requests.get(route)
        if known is None:
            requests = self.numbers.counter("dynaxx_requests_total", route=route)
            known = self._requests[route] = requests, self.numbers.counter("dynaxx_tokens_total", route=route)
        return known

    def flush(self) -> None:
        """Record every measurement that is ready, without waiting."""
        while True:
            try:
                sample = self._pending.popleft()
            except IndexError:
                return
            if not sample.ready():
                self._pending.appendleft(sample)
                return
            self._record(sample)

    def _record(self, sample: Sample | RequestTimer) -> None:
        try:
            sample.record(self.numbers)
        except Exception as error:
            self.numbers.failed("probe", error)

    def _has_room(self) -> bool:
        """Return whether another measurement may be queued."""
        if len(self._pending) >= MAX_PENDING:
            self.flush()
        if len(self._pending) < MAX_PENDING:
            return True
        self.numbers.failed("probe", f"more than {MAX_PENDING} measurements wait for the GPU; one is dropped")
        return False

    def _keep(self, sample: Sample | RequestTimer) -> None:
        """Record a measurement now, or with others later if a GPU must reach it first."""
        self._pending.append(sample)
        if sample.on_host or len(self._pending) >= TOGETHER:
            self.flush()

    def _called(self, call: Call, k: Tensor, v: Tensor) -> str:
        """Count a call by the backend that `sparse_attention` chooses for it, and return the backend."""
        q, layout = call._q, call._layout
        if layout is None:
            return self._named(call, "unknown")
        grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        key = (call._layer, call._phase, q.dtype, q.is_cuda, layout.block_size, grads)  # heads are fixed per layer
        known = self._known.get(key)
        if known is None:
            try:
                backend = ATTENTION.resolve(check_inputs(q, k, v, layout, values=False))
            except Exception as error:
                self.numbers.failed("probe", error)
                return self._named(call, "unknown")
            known = self._known[key] = self._backend_calls(backend, call._phase)
        known.count_one()
        return known.backend

    def _named(self, call: Call, backend: str) -> str:
        """Count a call of a named backend."""
        self._backend_calls(backend, call._phase).count_one()
        return backend

    def _backend_calls(self, backend: str, phase: str) -> CallCounters:
        known = self._known.get((backend, phase))
        if known is None:
            count = self.numbers.counter("dynaxx_layer_calls_total", backend=backend, phase=phase)
            known = self._known[backend, phase] = CallCounters(backend, count)
        return known


class Call:
    """One sparse call of a layer. Call `selected(layout)` when its blocks are chosen, and `done(k, v)` after it ran.

    If the call fails in between, call `probe.fallback(reason)` instead.
    """

    __slots__ = ("_layer", "_layout", "_phase", "_probe", "_q")

    def __init__(self, probe: Probe, layer: int, q: Tensor, phase: str) -> None:
        self._probe, self._layer, self._q, self._phase = probe, layer, q, phase
        self._layout: BlockLayout | None = None

    def selected(self, layout: BlockLayout) -> None:
        """Record that the blocks are chosen and attention starts."""
        self._layout = layout

    def done(self, k: Tensor, v: Tensor, *, backend: str = "") -> None:
        """Record that the call ran on `backend`, by default the one that `sparse_attention` chooses."""
        self._count(k, v, backend)

    def _count(self, k: Tensor, v: Tensor, backend: str) -> str:
        return self._probe._named(self, backend) if backend else self._probe._called(self, k, v)


class MeasuredCall(Call):
    """A call that is timed, and whose layout is counted."""

    __slots__ = ("_clock", "_selected", "_started")

    def __init__(self, probe: Probe, layer: int, q: Tensor, phase: str, clock: Clock) -> None:
        super().__init__(probe, layer, q, phase)
        self._clock = clock
        self._started = self._selected = clock.mark()

    def selected(self, layout: BlockLayout) -> None:
        """Record that the blocks are chosen. See `Call`."""
        self._layout = layout
        self._selected = self._clock.mark()

    def done(self, k: Tensor, v: Tensor, *, backend: str = "") -> None:
        """Record that the call ran. See `Call`."""
        ended = self._clock.mark()
        probe = self._probe
        backend = self._count(k, v, backend)
        try:
            layout = self._layout
            overlap = probe._random if probe._measured % OVERLAP_EVERY == 0 else None
            probe._measured += 1
            sample = Sample(
                layer=self._layer,
                phase=self._phase,
                backend=backend,
                clock=self._clock,
                marks=(self._started, self._selected, ended),
                blocks=None if layout is None else count_blocks(self._q, v, layout, probe._slots, overlap),
                copied=self._clock.mark(),
            )
        except Exception as error:
            probe.numbers.failed("probe", error)
        else:
            probe._keep(sample)


class RequestTimer:
    """Count a forward pass over prompts, and time it from construction to `done()` if it has a clock."""

    __slots__ = ("_clock", "_ended", "_probe", "_route", "_started", "_tokens")

    def __init__(self, probe: Probe, route: str, tokens: int, clock: Clock | None) -> None:
        self._probe, self._route, self._tokens, self._clock = probe, route, tokens, clock
        self._started = None if clock is None else clock.mark()
        self._ended: Any = None

    def done(self, *, route: str = "") -> None:
        """End the pass, which may still run on a GPU. `route` replaces the route if it changed during the pass."""
        self._route = route or self._route
        requests, tokens = self._probe.request_counters(self._route)
        requests()
        tokens(self._tokens)
        if self._clock is not None:
            self._ended = self._clock.mark()
            self._probe._keep(self)

    @property
    def on_host(self) -> bool:
        """Return whether the pass ran on the CPU, so that its time is known."""
        return self._clock is HOST_CLOCK

    def ready(self) -> bool:
        """Return whether the GPU has finished the pass."""
        assert self._clock is not None, "only timed passes are queued"
        return self._clock.ready(self._ended)

    def record(self, numbers: Recorder) -> None:
        """Record the pass in the metrics. Call it only when the pass is ready."""
        assert self._clock is not None, "only timed passes are queued"
        seconds = self._clock.seconds(self._started, self._ended)
        self._clock.release(self._started, self._ended)
        numbers.observe("dynaxx_request_seconds", seconds, route=self._route)
