# SPDX-License-Identifier: Apache-2.0
"""Find the length from which sparse attention, selection included, is faster than dense on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaxx.lab.models import longest_prompt
from dynaxx.ops import sparse_attention
from dynaxx.policy import LayerPlan, resolve

if TYPE_CHECKING:
    from dynaxx.policy import Policy

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
GPU_LENGTHS = (*LENGTHS, 16384, 32768)  # dense attention is fast up to longer lengths
REPEATS = 5
ROW = 8  # layers timed in a row on a GPU, so that launches overlap with the work of other layers
LONG = 4096  # tokens from which there are fewer repeats, since runs take seconds and noise is small
GAIN = 1.25  # smallest speed-up that counts; less would hardly show in the whole model
HYSTERESIS = 1.25  # sparse_from / dense_below


@dataclass(frozen=True)
class LengthTiming:
    """Median seconds of attention in all sparse layers of a prefill, extrapolated from the sampled ones."""

    seqlen: int
    dense_seconds: float
    sparse_seconds: float


@torch.no_grad()
def time_lengths(
    model: Any,
    policy: Policy,
    lengths: Sequence[int] | None = None,
    *,
    has_time: Callable[[float], bool] = lambda seconds: True,
) -> list[LengthTiming]:
    """Time dense (SDPA) and the policy's attention at several lengths, interleaved, on random inputs.

    The function times three layers, of the lowest, middle and highest density, and uses their mean for all. On a GPU it
    times a row of up to `ROW` calls without synchronisation between them, as in a model.

    Args:
        model: a causal language model of transformers.
        policy: a policy for it.
        lengths: lengths to time; by default some up to the model's context, and the context itself.
        has_time: a function of the estimated seconds for the next length; if it returns False, that length and longer
            ones are skipped.
    """
    plans = resolve(policy)
    if not plans:
        return []
    parameter = next(model.parameters())
    facts = policy.model
    typical = _typical(list(plans.values()))
    lengths = lengths or within(GPU_LENGTHS if parameter.device.type == "cuda" else LENGTHS, longest_prompt(model))
    row = min(ROW, len(plans)) if parameter.device.type == "cuda" else 1
    found: list[LengthTiming] = []
    seconds = 0.0  # seconds of the previous length
    for seqlen in lengths:
        if found and not has_time(seconds * (seqlen / found[-1].seqlen) ** 2):
            break
        started = time.perf_counter()
        q, k, v = (
            torch.randn(1, heads, seqlen, facts.head_dim, dtype=parameter.dtype, device=parameter.device)
            for heads in (facts.q_heads, facts.kv_heads, facts.kv_heads)
        )
        runs = [partial(_attend_densely, q, k, v), *(partial(_attend, plan, q, k, v) for plan in typical)]
        rows = [partial(_in_a_row, run, row) for run in runs]
        dense, *sparse = interleaved(rows, REPEATS if seqlen < LONG else 2, parameter.device)
        layers = len(plans) / row
        found.append(LengthTiming(seqlen, dense * layers, statistics.mean(sparse) * layers))
        seconds = time.perf_counter() - started
    return found


def within(lengths: Sequence[int], limit: int) -> list[int]:
    """Return the lengths up to a limit, and the limit itself if it excludes any."""
    return [*(length for length in lengths if length < limit), *([limit] if limit <= lengths[-1] else [])]


def _in_a_row(run: Callable[[], Tensor], count: int) -> None:
    for _ in range(count):
        run()


def _attend_densely(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _attend(plan: LayerPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sparse_attention(q, k, v, plan.layout(q, k))


def _typical(plans: list[LayerPlan]) -> list[LayerPlan]:
    """Return the plans with the lowest, middle and highest budget."""

    def weight(plan: LayerPlan) -> float:
        selectors = [getattr(group.rule, "selector", None) for group in plan.groups]
        budgets = [0.0 if each is None else getattr(each, each.budget_field) for each in selectors]
        flat = [x for budget in budgets for x in (budget if isinstance(budget, tuple) else (budget,))]
        return sum(flat) / max(1, len(flat))

    ordered = sorted(plans, key=weight)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def interleaved(runs: Sequence[Callable[[], Any]], repeats: int, device: torch.device) -> list[float]:
    """Return the median seconds of each call. Calls run in turns, so that changes of the machine affect all alike."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for index, run in enumerate(runs):
            wait()
            start = time.perf_counter()
            run()
            wait()
            if repeat:  # the first round warms up
                seconds[index].append(time.perf_counter() - start)
    return [statistics.median(each) for each in seconds]


def dense_below(timings: Sequence[LengthTiming]) -> int | None:
    """Return the shortest measured length from which sparse stays faster, or None if it is slower at the longest."""
    border = None
    for timing in sorted(timings, key=lambda each: -each.seqlen):
        if timing.dense_seconds < GAIN * timing.sparse_seconds:
            break
        border = timing.seqlen
    return border
