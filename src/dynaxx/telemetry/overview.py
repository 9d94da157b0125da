# SPDX-License-Identifier: Apache-2.0
"""`Overview`: the state of a running process as numbers and concerns, from two snapshots. All views show it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from dynaxx.forks import new_event
from dynaxx.printable import printable
from dynaxx.storage import strict_json
from dynaxx.telemetry.catalog import EVENTS
from dynaxx.telemetry.snapshot import Snapshot

# Limits, equal to those in alerts.yml.
RECALL_LOW = 0.9
ERROR_HIGH = 0.1
FALLBACKS_HIGH = 0.01
DRIFTED = 1.0
SILENT_AFTER = 30.0  # seconds without a change

GUARD = ("quiet", "warns", "widened the budget", "runs dense")
WINDOW = 60.0  # seconds over which rates are computed
MAX_HISTORY = 240
MAX_FAULTS = 3  # faults shown


@dataclass(frozen=True)
class Concern:
    """A finding that needs a person's attention."""

    level: Literal["bad", "warn"]
    text: str


@dataclass(frozen=True)
class LayerEstimates:
    """The estimates of one layer, None where there is none yet."""

    layer: int
    density: float | None
    recall: float | None
    output_error: float | None
    drift: float | None

    @property
    def strain(self) -> float:
        """The ratio of the layer's worst estimate to its limit; 1 is at the limit."""
        lost = 0.0 if self.recall is None else (1 - self.recall) / (1 - RECALL_LOW)
        return max(lost, (self.output_error or 0.0) / ERROR_HIGH, (self.drift or 0.0) / DRIFTED)


@dataclass(frozen=True)
class Overview:
    """The state of a process at one reading. Means and rates cover the last `window_seconds`, or the whole run if None.

    Attributes:
        problem: why the last reading failed; the numbers are then those of the reading before.
        concerns: findings that need attention, worst first.
    """

    source: str
    problem: str = ""
    faults: tuple[str, ...] = ()  # files and series that could not be read
    age_seconds: float = 0.0  # time since the last reading began, if it has not ended for long
    silent_seconds: float = 0.0  # time since the numbers last changed
    window_seconds: float | None = None
    uptime_seconds: float | None = None
    models: list[str] = field(default_factory=list)
    policy: dict[str, Any] = field(default_factory=dict)  # version, digest, loaded, stale
    kill_switch: bool = False
    killed_by: str = ""  # what engaged the kill switch, if the source has events
    rollout: float | None = None
    guard_level: int = 0
    requests_per_second: dict[str, float] = field(default_factory=dict)  # by route
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    request_seconds: dict[str, float | None] = field(default_factory=dict)  # p50, p95
    calls: dict[str, float] = field(default_factory=dict)  # layer calls in the window, by backend
    dense_calls: dict[str, float] = field(default_factory=dict)  # by reason
    fallbacks: dict[str, float] = field(default_factory=dict)  # by reason, over the whole run
    fallback_share: float | None = None  # share of the calls that should have been sparse
    density: float | None = None
    overlap: float | None = None
    attention_seconds: float | None = None  # mean per call
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    selection_share: float | None = None  # share of selection in the time of selection and attention
    kv_cache_bytes: float | None = None
    recall: float | None = None
    output_error: float | None = None
    next_token_kl: float | None = None
    drift: float | None = None
    layers: list[LayerEstimates] = field(default_factory=list)
    event_counts: dict[str, float] = field(default_factory=dict)
    recent_events: list[dict[str, Any]] = field(default_factory=list)
    telemetry_errors: dict[str, float] = field(default_factory=dict)
    concerns: list[Concern] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether no concern is of level "bad"."""
        return not any(concern.level == "bad" for concern in self.concerns)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. Numbers that are not finite, such as an overflowed sum, become None."""
        plain: dict[str, Any] = strict_json(asdict(self))
        return plain


class Watch:
    """Read the metrics of a process repeatedly.

    Args:
        read: a function that returns a snapshot, or raises ValueError or OSError.
        source: the name to show.
        window: seconds over which rates are computed.
        clock: a monotonic clock.
    """

    def __init__(
        self,
        read: Callable[[], Snapshot],
        source: str,
        *,
        window: float = WINDOW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._source, self._window, self._clock = read, printable(source), window, clock
        self._kept: deque[tuple[float, Snapshot]] = deque()
        self._moved = clock()
        self.history: deque[dict[str, float | None]] = deque(maxlen=MAX_HISTORY)

    def look(self) -> Overview:
        """Read once more. If the reading fails, return the last numbers with `problem` set.

        Raises:
            ValueError: the first reading fails.
            OSError: the first reading fails.
            ImportError: the first reading fails.
        """
        moment = self._clock()
        try:
            now = self._read()
            seen = self._seen(moment, now, "")
        except Exception as error:  # show any error of another process instead of ending
            if not self._kept:
                raise
            seen = self._seen(moment, None, printable(error, most=500) or type(error).__name__)
        self._remember(seen)
        return seen

    def _seen(self, moment: float, now: Snapshot | None, problem: str) -> Overview:
        """Return the overview of a reading, or of the previous reading if `now` is None."""
        if now is not None:
            if not self._kept:
                self._moved = moment - (0.0 if now.uptime is None else max(0.0, time.time() - now.time))
            elif (now.readings, now.uptime) != (self._kept[-1][1].readings, self._kept[-1][1].uptime):
                self._moved = moment
            self._kept.append((moment, now))
        else:
            now = self._kept[-1][1]
        while len(self._kept) > 2 and self._kept[1][0] <= moment - self._window:
            self._kept.popleft()
        then, earlier = self._kept[0]
        if len(self._kept) == 1:
            return overview(self._source, now, now, now.uptime, problem, moment - self._moved)
        delta = now.since(earlier)
        seconds = moment - then if delta.uptime is None else delta.uptime
        return overview(self._source, now, delta, seconds, problem, moment - self._moved)

    def _remember(self, seen: Overview) -> None:
        self.history.append(
            strict_json(
                {
                    "tokens_per_second": sum(seen.tokens_per_second.values()),
                    "request_seconds_p95": seen.request_seconds["p95"],
                    "density": seen.density,
                    "recall": seen.recall,
                    "output_error": seen.output_error,
                    "drift": seen.drift,
                }
            )
        )


def overview(
    source: str, now: Snapshot, delta: Snapshot, seconds: float | None, problem: str = "", silent: float = 0.0
) -> Overview:
    """Return the overview of a snapshot `now` and of `delta`, the counts of the last `seconds`."""
    recent = lambda name: delta.mean(name) if delta.mean(name) is not None else now.mean(name)
    rates = lambda found: {key: value / seconds for key, value in found.items()} if seconds else {}
    latest = delta if delta.mean("dynaxx_request_seconds") is not None else now
    measured = delta if delta.total("dynaxx_attention_seconds") else now
    attention, selection = (measured.total(f"dynaxx_{part}_seconds") for part in ("attention", "selection"))
    per_second = lambda name: measured.total(name) / attention if attention else None
    calls = delta.by("dynaxx_layer_calls_total", "backend")
    fallen = delta.total("dynaxx_fallbacks_total")
    wanted = sum(count for backend, count in calls.items() if backend != "dense") + fallen
    seen = Overview(
        source=source,
        problem=problem,
        faults=now.faults,
        silent_seconds=silent,
        window_seconds=seconds,
        uptime_seconds=now.uptime,
        models=sorted({r.labels["model_name"] for found in now.readings.values() for r in found} - {""}),
        policy=_policy(now),
        kill_switch=bool(now.gauge("dynaxx_kill_switch")),
        killed_by=_killed_by(now),
        rollout=now.gauge("dynaxx_rollout_ratio"),
        guard_level=int(max(0.0, min(3.0, now.gauge("dynaxx_guard_level") or 0.0))),
        requests_per_second=rates(delta.by("dynaxx_requests_total", "route")),
        tokens_per_second=rates(delta.by("dynaxx_tokens_total", "route")),
        request_seconds={f"p{p}": latest.quantile("dynaxx_request_seconds", p / 100) for p in (50, 95)},
        calls=calls,
        dense_calls=delta.by("dynaxx_dense_calls_total", "reason"),
        fallbacks=now.by("dynaxx_fallbacks_total", "reason"),
        fallback_share=fallen / wanted if wanted else None,
        density=recent("dynaxx_density_ratio"),
        overlap=recent("dynaxx_overlap_ratio"),
        attention_seconds=recent("dynaxx_attention_seconds"),
        flops_per_second=per_second("dynaxx_attention_flops_total"),
        bytes_per_second=per_second("dynaxx_attention_bytes_total"),
        selection_share=selection / (selection + attention) if selection else None,
        kv_cache_bytes=now.gauge("dynaxx_kv_cache_bytes"),
        recall=recent("dynaxx_recall_ratio"),
        output_error=recent("dynaxx_output_error_ratio"),
        next_token_kl=recent("dynaxx_next_token_kl_nats"),
        drift=now.gauge("dynaxx_layer_drift_ratio"),
        layers=_layers(now),
        event_counts=now.by("dynaxx_events_total", "event"),
        recent_events=now.events[-12:],
        telemetry_errors=now.by("dynaxx_telemetry_errors_total", "what"),
    )
    return replace(seen, concerns=concerns_of(seen))


def concerns_of(seen: Overview) -> list[Concern]:
    """Return the findings that need attention, worst first."""
    percent = lambda share: f"{100 * share:.1f} %"
    by = f" ({seen.killed_by})" if seen.killed_by else ""
    found = [
        (seen.kill_switch, "bad", f"the kill switch is on{by}, so everything runs dense"),
        (bool(seen.problem), "bad", f"cannot be read: {seen.problem}"),
        (seen.age_seconds > 0, "bad", f"these numbers are {seen.age_seconds:.0f} s old; the source does not answer"),
        *((True, "bad", f"not read: {fault}") for fault in seen.faults[:MAX_FAULTS]),
        (len(seen.faults) > MAX_FAULTS, "bad", f"not read: {len(seen.faults) - MAX_FAULTS} more"),
        (seen.silent_seconds > SILENT_AFTER, "bad", f"no change for {seen.silent_seconds:.0f} s"),
        (seen.guard_level == 3, "bad", "the guard runs everything dense"),
        (_over(RECALL_LOW, seen.recall), "bad", f"recall is {percent(seen.recall or 0)}, below {percent(RECALL_LOW)}"),
        (_over(seen.output_error, ERROR_HIGH), "bad", f"the output error is {percent(seen.output_error or 0)}"),
        (_over(seen.fallback_share, FALLBACKS_HIGH), "bad", f"{percent(seen.fallback_share or 0)} of calls fall back"),
        (bool(seen.policy.get("stale")), "warn", "the new policy file was refused; the previous policy is in force"),
        (seen.guard_level in (1, 2), "warn", f"the guard {GUARD[seen.guard_level]}"),
        (_over(seen.drift, DRIFTED, equal=True), "warn", "attention has drifted; tune again (dynaxx retune)"),
        (bool(seen.telemetry_errors), "warn", "telemetry had errors: " + ", ".join(seen.telemetry_errors)),
    ]
    return [Concern("bad" if level == "bad" else "warn", text) for wrong, level, text in found if wrong]


def _over(value: float | None, limit: float | None, *, equal: bool = False) -> bool:
    if value is None or limit is None:
        return False
    return value > limit or (equal and math.isclose(value, limit))


def _policy(now: Snapshot) -> dict[str, Any]:
    infos = now.get("dynaxx_policy_info")
    if not infos:
        return {}
    return {
        "version": infos[-1].labels["version"],
        "digest": infos[-1].labels["digest"],
        "loaded": now.gauge("dynaxx_policy_loaded_timestamp_seconds"),
        "stale": bool(now.gauge("dynaxx_policy_stale")),
    }


def _killed_by(now: Snapshot) -> str:
    """Return the reason of the last event that engaged the kill switch, if it is still on."""
    switched = [each for each in now.events if each["name"] in ("kill_switch_on", "kill_switch_off")]
    if not switched or switched[-1]["name"] == "kill_switch_off" or not now.gauge("dynaxx_kill_switch"):
        return ""
    return printable(switched[-1].get("facts", {}).get("reason", ""), most=200)


def _layers(now: Snapshot) -> list[LayerEstimates]:
    """Return every layer that has an estimate, in order."""
    names = ("density", "recall", "output_error", "drift")
    found = {name: now.by(f"dynaxx_layer_{name}_ratio", "layer") for name in names}
    named = {layer for values in found.values() for layer in values}
    indices = sorted(int(layer) for layer in named if layer.isdecimal() and layer.isascii() and len(layer) < 10)
    return [LayerEstimates(i, *(found[name].get(str(i)) for name in names)) for i in indices]


def describe_event(event: dict[str, Any]) -> str:
    """Return a description of an event with its facts."""
    facts = ", ".join(f"{k} {v}" for k, v in event.get("facts", {}).items() if k not in ("model_name", "engine"))
    words = EVENTS.get(event["name"], event["name"])
    return f"{words} ({facts})" if facts else words


LATE = 3  # intervals after which an unfinished reading counts as late
LATE_SECONDS = 10.0  # smallest such delay


class BackgroundWatch:
    """Read every `interval` seconds until `close()`. `latest` always returns at once.

    Raises:
        ValueError: the first reading fails, see `Watch.look`.
        OSError: the first reading fails, see `Watch.look`.
        ImportError: the first reading fails, see `Watch.look`.
    """

    def __init__(self, watch: Watch, interval: float) -> None:
        self._watch, self._interval = watch, interval
        self._seen = watch.look()
        self._began = time.monotonic()  # start of the last reading
        self._closed = new_event()
        self._thread = threading.Thread(target=self._run, name="dynaxx watch", daemon=True)
        self._thread.start()

    @property
    def history(self) -> list[dict[str, float | None]]:
        """The numbers of earlier readings, oldest first."""
        return list(self._watch.history)

    def latest(self) -> Overview:
        """Return the last overview. If the source has not answered for long, its age is the worst concern."""
        seen, age = self._seen, time.monotonic() - self._began
        if age <= max(LATE * self._interval, LATE_SECONDS):
            return seen
        late = replace(seen, age_seconds=age)
        return replace(late, concerns=concerns_of(late))

    def close(self) -> None:
        """Stop reading, without waiting for a reading that hangs."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            seen = self._watch.look()
            self._seen, self._began = seen, time.monotonic()
