# SPDX-License-Identifier: Apache-2.0
"""Run the guard: sample calls, measure them in the background, compare with limits, record attention statistics.

A request pays only for copying the inputs of a sampled call. Errors in this module are counted and logged once, and
never reach a request.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.forks import new_lock
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.measure import CallMeasure, dense_rows, measure, most_rows
from dynaxx.policy import DriftDetector, Guard, LayerPlan, Policy, Profile, rules_digest
from dynaxx.policy.drift import HeadDrift, LayerDrift
from dynaxx.policy.guard import LayerGuard, Level
from dynaxx.policy.plan import scaled_plan
from dynaxx.policy.profile import LADDER, LayerRecord
from dynaxx.telemetry import Recorder

MAX_BYTES = {"cpu": 256 * 1024 * 1024, "cuda": 1024 * 1024 * 1024}  # limit on a copied call; larger calls are skipped
LADDER_EVERY = 4  # one in so many measured calls of a layer also measures recall at other budgets

logger = logging.getLogger("dynaxx")


class Sampled(NamedTuple):
    """A copy of one sequence of one sparse call, (1, N, heads, head_dim)."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    rows: tuple[int, ...]  # query rows to measure
    plan: LayerPlan  # the policy's plan
    ran: LayerPlan | None  # the plan that ran; None if the guard made the layer dense
    out: Tensor | None  # (R, heads, head_dim) output of the rows, if the call ran sparse
    ready: Any  # on a GPU, the event after which the copies are complete


class LiveGuard:
    """The guard, the drift detector and the statistics of one policy in force.

    Args:
        policy: a policy with a `guard`.
        plans: the policy's plans by layer.
        numbers: the recorder.
        background: the thread for the measurements.

    Attributes:
        levels: the guard of each layer.
        whole: the guard of the whole model, by next-token distributions.
        worst: the highest level of all.
        detector: the drift detector; None if the policy has no reference.
    """

    def __init__(self, policy: Policy, plans: dict[int, LayerPlan], numbers: Recorder, background: Background) -> None:
        assert policy.guard is not None, "the policy must have a guard"
        self.settings: Guard = policy.guard
        self.levels = {layer: LayerGuard(self.settings) for layer in plans}
        self.whole = LayerGuard(self.settings)  # for all layers, by next-token distributions
        self.detector = DriftDetector(policy.reference, policy.drift) if policy.reference else None
        self._policy = policy
        self._numbers = numbers
        self._background = background
        self._records = {layer: LayerRecord(plan.q_heads) for layer, plan in plans.items()}
        self._random = random.Random(policy.rollout.seed)
        self._lock = new_lock()
        self._requests = 0
        self._stream: Any = None
        self.worst = Level.OK
        self._recommended = False

    def level(self, layer: int) -> Level:
        """Return the current level of a layer."""
        return max(self.levels[layer].level, self.whole.level)

    def plan(self, layer: int, nominal: LayerPlan) -> LayerPlan:
        """Return the plan to run: the policy's plan, or a wider one."""
        return _wider(nominal, self.settings.widen) if self.level(layer) == Level.WIDENED else nominal

    def wants_call(self) -> bool:
        """Return whether to sample this call."""
        return self._random.random() < self.settings.sample

    def wants_request(self) -> bool:
        """Return whether to compare this request's next token."""
        self._requests += 1
        return self.settings.kl_sample > 0 and self._random.random() < self.settings.kl_sample

    def take(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        plan: LayerPlan,
        ran: LayerPlan | None,
        out: Tensor | None,
    ) -> None:
        """Copy one sequence of a call and queue its measurement, if there is room. Never raises.

        Args:
            layer: index of the layer.
            q: (1, Lq, heads, head_dim), aligned to the last keys.
            k: (1, N, heads, head_dim).
            v: (1, N, heads, head_dim).
            scale: softmax scale; None means head_dim ** -0.5.
            plan: the policy's plan.
            ran: the plan that ran; None if the guard made the layer dense.
            out: (1, Lq, heads, head_dim) output, if the call ran sparse.
        """
        try:
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                return
            size = (q.numel() + k.numel() + v.numel()) * q.element_size()
            if size > MAX_BYTES.get(q.device.type, 0):
                self.left_out("too large")
                return
            count = most_rows(q.shape[2], k.shape[1], min(self.settings.rows, q.shape[1]))
            rows = tuple(sorted(self._random.sample(range(q.shape[1]), count)))
            with torch.no_grad():
                own_q, own_k, own_v = (x.detach().clone() for x in (q, k, v))
                some = None if out is None else out.detach()[0, list(rows)]
            ready = torch.cuda.Event() if q.is_cuda else None
            if ready is not None:
                ready.record()
            sample = Sampled(layer, own_q, own_k, own_v, scale, rows, plan, ran, some, ready)
            if not self._background.submit(lambda: self._measure(sample)):
                self.left_out("dropped")
        except Exception as error:
            self.failed(error)

    def left_out(self, why: str) -> None:
        """Count a skipped call: "dropped" (the queue is full), "too large" to copy, or "decode"."""
        self._numbers.add("dynaxx_guard_checks_total", verdict=why)

    def failed(self, error: Exception) -> None:
        """Count and log an error of the guard."""
        self._numbers.failed("guard", error)

    @torch.no_grad()
    def _measure(self, sample: Sampled) -> None:
        with self._on_own_stream(sample):
            rows = dense_rows(sample.q, sample.k, sample.v, sample.rows, sample.scale)
            layout = sample.plan.layout(sample.q, sample.k, scale=sample.scale)
            same = sample.ran == sample.plan
            nominal = measure(rows, sample.v, layout, sample.out if same else None).cpu()
            widened = None
            if sample.ran is not None and not same:
                wider = sample.ran.layout(sample.q, sample.k, scale=sample.scale)
                widened = measure(rows, sample.v, wider, sample.out).cpu()
            ladder = None
            if self._records[sample.layer].calls % LADDER_EVERY == 0:
                plans = [sample.plan if factor == 1 else scaled_plan(sample.plan, factor) for factor in LADDER]
                layouts = [
                    layout if p is sample.plan else p.layout(sample.q, sample.k, scale=sample.scale) for p in plans
                ]
                ladder = torch.stack([measure(rows, sample.v, each).recall for each in layouts], -1).cpu()
        with self._lock:
            self._judge(sample.layer, nominal, widened, ladder)

    @contextlib.contextmanager
    def _on_own_stream(self, sample: Sampled) -> Iterator[None]:
        """Use a separate stream within the block, on a GPU, so that requests do not wait."""
        if sample.ready is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(sample.q.device, priority=0)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(sample.ready)
            yield

    def _judge(self, layer: int, nominal: CallMeasure, widened: CallMeasure | None, ladder: Tensor | None) -> None:
        guard, numbers = self.levels[layer], self._numbers
        before = guard.level
        beyond = guard.add(_means(nominal), None if widened is None else _means(widened))
        shown = _means(nominal if widened is None else widened)
        numbers.add("dynaxx_guard_checks_total", verdict="violated" if beyond else "ok")
        numbers.observe("dynaxx_recall_ratio", shown["recall"])
        numbers.observe("dynaxx_output_error_ratio", shown["error"])
        numbers.set("dynaxx_layer_recall_ratio", shown["recall"], layer=layer)
        numbers.set("dynaxx_layer_output_error_ratio", shown["error"], layer=layer)
        self._tell(f"layer {layer}", guard, before)
        record, values = self._records[layer], nominal.statistics()
        record.add(values)
        if ladder is not None:
            record.add_ladder(ladder)
        found = self.detector.add(layer, values) if self.detector else None
        if found is not None:
            self._tell_drift(found)

    def judge_request(self, kl: float) -> None:
        """Add the KL(dense || sparse) in nats of a request's next-token distribution."""
        with self._lock:
            before = self.whole.level
            beyond = self.whole.add({"kl": kl})
            self._numbers.add("dynaxx_guard_checks_total", verdict="violated" if beyond else "ok")
            self._numbers.observe("dynaxx_next_token_kl_nats", kl)
            self._tell("next tokens", self.whole, before)

    def _tell(self, what: str, guard: LayerGuard, before: Level) -> None:
        """Report a change of level as an event and in the log."""
        if guard.level == before:
            return
        names = {Level.WARNED: "guard_warned", Level.WIDENED: "guard_widened", Level.DENSE: "guard_dense"}
        self._numbers.event(names.get(guard.level, "guard_recovered"))
        self.worst = max(self.whole.level, *(each.level for each in self.levels.values()))
        self._numbers.set("dynaxx_guard_level", int(self.worst))
        said = "within its limits again" if guard.level == Level.OK else "; ".join(guard.reasons())
        logger.warning("guard: %s: %s (now %s)", what, said, guard.level.name.lower())

    def _tell_drift(self, found: LayerDrift) -> None:
        detector, numbers = self.detector, self._numbers
        assert detector is not None, "only a detector finds drift"
        numbers.set("dynaxx_layer_drift_ratio", found.ratio, layer=found.layer)
        first = found.drifted and len(detector.drifted) == 1 and not self._recommended
        if first:
            self._recommended = True
            numbers.event("drift_found", layer=found.layer)
            numbers.event("retune_recommended", layer=found.layer)
            logger.warning(
                "drift: attention differs from the policy's reference, run dynaxx retune: %s", found.evidence[0]
            )
        elif self._recommended and not detector.drifted:
            self._recommended = False
            numbers.event("drift_gone")

    def drift(self) -> list[HeadDrift]:
        """Return the evidence of all layers that have drifted, worst head first."""
        with self._lock:
            layers = list(self.detector.drifted.values()) if self.detector else []
        return sorted((each for layer in layers for each in layer.evidence), key=lambda each: -each.distance)

    def statistics(self, command: str = "") -> Profile | None:
        """Return the profile recorded since this policy came into force, or None before the first measured call."""
        with self._lock:
            layers = tuple(each.to_profile(layer) for layer, each in sorted(self._records.items()) if each.calls)
        if not layers:
            return None
        return Profile(
            policy=rules_digest(self._policy),
            command=command,
            requests=self._requests,
            rows=self.settings.rows,
            layers=layers,
        )


_wider = lru_cache(maxsize=512)(scaled_plan)


def _means(measured: CallMeasure) -> dict[str, float]:
    return {"recall": float(measured.recall.mean()), "error": float(measured.error.mean())}
