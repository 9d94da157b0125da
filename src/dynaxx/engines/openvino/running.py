# SPDX-License-Identifier: Apache-2.0
"""Run a policy in an OpenVINO model: each attention call, on memory that OpenVINO owns.

OpenVINO:  ... --> SparseAttention.evaluate(q, k, v, mask) --> ...
| pointers, no copies
dynaxx:    route: a rule -> its layout, else exact causal -> C++ core -> OpenVINO's output
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.policy_events import PolicyEvents
from dynaxx.integrations.runtime.routing import CallProperties, DenseReason, Route, SequenceLengths, is_step, route
from dynaxx.kernels.attention import cpu
from dynaxx.layout import BlockLayout
from dynaxx.patterns import Causal
from dynaxx.policy import KILL_SWITCH, KillSwitch, Policy
from dynaxx.telemetry import recorder

logger = logging.getLogger("dynaxx")

EXACT_BLOCK = 64
MASK_ROWS = 1024  # rows of a mask compared at a time
EXACT = Causal()


def cpu_config(precision: str = "f32", threads: int | None = None) -> dict[str, Any]:
    """Return options of `openvino.Core.compile_model(model, "CPU", options)` for a model with a policy.

    OpenVINO pins its threads to cores by default. dynaxx's threads would inherit the pinning and share one core.

    Args:
        precision: "f32" or "bf16", for `INFERENCE_PRECISION_HINT`.
        threads: number of threads of both libraries; `torch.get_num_threads()` by default.
    """
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,
    }


class Arguments(NamedTuple):
    """The tensors of one attention call, on OpenVINO's memory."""

    q: Tensor  # (batch, seqlen_q, q_heads, head_dim)
    k: Tensor  # (batch, seqlen_k, kv_heads, head_dim)
    v: Tensor  # (batch, seqlen_k, kv_heads, head_dim_v)
    mask: Tensor | None  # broadcasts to (batch, q_heads, seqlen_q, seqlen_k), bool or additive; None: causal
    out: Tensor  # (batch, seqlen_q, q_heads, head_dim_v), written by the call
    scale: float


class OpenVinoHandle:
    """A policy in an OpenVINO model, for all its compiled forms.

    Attributes:
        layers: number of attention nodes that run on dynaxx.
        counts: counts of the layer calls.
        kill_switch: `engage()` makes all attention dense from the next layer call on.
        half: whether calls are computed in bf16, which is exact if OpenVINO runs in bf16.
    """

    def __init__(self, policy: Policy, *, half: bool = False, name: str = "openvino") -> None:
        numbers = recorder().bind(model_name=name)
        self.counts = Counts(numbers)
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self.half = half
        self.layers = 0
        self._deployed = Deployed(policy, numbers, Background(partial(numbers.failed, "guard")), own_pattern=True)
        self._logged: set[str] = set()
        PolicyEvents(numbers).in_force(self._deployed)

    @property
    def policy(self) -> Policy:
        """The current policy."""
        return self._deployed.policy

    @property
    def stats(self) -> dict[str, Any]:
        """Return the counts of layer calls, like the handle of `dynaxx.apply`."""
        return self.counts.to_dict()

    @torch.inference_mode()
    def attend(self, layer: int, call: Arguments) -> None:
        """Compute one attention call of a layer into `call.out`."""
        _warn_about_pinning(self._logged)
        seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
        if not call.out.numel():
            return
        decodes = is_step(seqlen_q, seqlen_k)
        phase = "decode" if seqlen_q == 1 else "prefill"
        blocked = DenseReason.KILLED if self.kill_switch.engaged() else None
        if call.mask is not None:
            self._dense(call, DenseReason.MASK_KIND, phase)
            return
        state = self._deployed.state(layer, blocked)
        decision = route(
            self._deployed.rules_of(layer),
            state,
            CallProperties(serves_own_pattern=True),
            SequenceLengths(seqlen_q, seqlen_k, decodes),
        )
        self._deployed.remember_length(seqlen_k, decodes=decodes)
        if decision.route is Route.DENSE:
            self._dense(call, decision.reason or DenseReason.NO_RULE, phase)
            return
        stopped = self._deployed.interruption(layer, own_pattern=decision.route is Route.OWN_PATTERN)
        if stopped is not None:
            self._dense(call, stopped, phase)
            return
        breaker = self._deployed.breakers[layer]
        try:
            with cpu.own_threads():  # OpenVINO's go on at once on the same cores
                self._sparse(layer, call, decision.route)
        except Exception as error:  # an error in a kernel must not fail the request
            breaker.failed()
            self.counts.failed(layer, error, phase)
            _dense_attention(call)
            return
        breaker.worked()
        if decision.route is Route.RULE:
            self.counts.sparse()
        else:
            self.counts.own_pattern(phase)

    def _sparse(self, layer: int, call: Arguments, chosen: Route) -> None:
        q, k, v, out = call.q, call.k, call.v, call.out
        if chosen is Route.OWN_PATTERN and q.shape[1] == 1:
            _dense_attention(call)  # one query that sees all keys: nothing to leave out
            return
        probe = self.counts.probe.start(layer, q) if chosen is Route.RULE else None
        if probe is not None:
            layout = self._deployed.plans[layer].layout(q, k, scale=call.scale)  # in fp32, which the core scores
            probe.selected(layout)
        else:
            layout = EXACT.layout(q.shape[1], k.shape[1], block_size=EXACT_BLOCK)
        if self.half:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        _forward(q, k, v, layout, call.scale, out)
        if probe is not None:
            probe.done(call.k, call.v)

    def _dense(self, call: Arguments, reason: DenseReason, phase: str) -> None:
        self.counts.dense(reason, phase)
        _dense_attention(call)


def is_causal_mask(mask: Tensor) -> bool:
    """Return whether a mask (batch, 1, seqlen_q, seqlen_k), bool or additive, is causal, aligned bottom-right."""
    if mask.shape[1] != 1:
        return False
    seqlen_q, seqlen_k = mask.shape[-2:]
    keys, offset = torch.arange(seqlen_k, dtype=torch.int32, device="cpu"), seqlen_k - seqlen_q
    for first in range(0, seqlen_q, MASK_ROWS):
        part = mask[:, 0, first : first + MASK_ROWS]
        shown = part if part.dtype == torch.bool else part == 0
        rows = torch.arange(first, first + part.shape[1], dtype=torch.int32, device="cpu")
        if not bool((shown == (keys <= rows[:, None] + offset)).all()):
            return False
        if part.dtype != torch.bool and bool(((part > -1e4) & (part != 0)).any()):  # a bias, not a mask
            return False
    return True


def _forward(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, out: Tensor) -> None:
    if out.dtype == q.dtype:
        cpu.attention_forward(q, k, v, layout, scale, out=out)
    else:
        out.copy_(cpu.attention_forward(q, k, v, layout, scale)[0])


def _dense_attention(call: Arguments) -> None:
    """Compute the model's own attention."""
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    mask, seqlen_q, seqlen_k = call.mask, q.shape[2], k.shape[2]
    if mask is None and seqlen_q == 1:  # the heads of a group as rows: torch's own way reads the keys for each head
        rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        call.out.copy_(scaled_dot_product_attention(rows, k, v, scale=call.scale).reshape(call.out.shape))
        return
    causal = mask is None and seqlen_q == seqlen_k
    if mask is None and not causal:
        mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device="cpu").tril(seqlen_k - seqlen_q)
    found = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=call.scale, enable_gqa=True)
    call.out.copy_(found.transpose(1, 2))


def _warn_about_pinning(said: set[str]) -> None:
    """Warn once that the threads share a core, which makes attention as slow as one thread."""
    if "pinning" in said or not hasattr(os, "sched_getaffinity"):
        return
    said.add("pinning")
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    if cores < threads:
        logger.warning(
            "OpenVINO pinned its thread to %d core(s), which %d attention threads would share: compile the model with "
            "dynaxx.engines.openvino.cpu_config(), or with ENABLE_CPU_PINNING=False",
            cores,
            threads,
        )
