# SPDX-License-Identifier: Apache-2.0
"""Find the length from which sparse attention, selection included, is faster than dense on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.models import longest_prompt
from dynaxx.lab.time_budget import Clock, TimeBudget
from dynaxx.ops import sparse_attention
from dynaxx.policy import LayerPlan, Policy, resolve

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
GPU_LENGTHS = (*LENGTHS, 16384, 32768)  # dense attention is fast up to longer lengths
REPEATS = 5
MAX_REPEATS = 20  # repeats while it is unclear whether sparse is faster
ROW = 8  # layers timed in a row on a GPU, so that launches overlap with the work of other layers
LONG = 4096  # tokens from which there are fewer repeats, since runs take seconds and noise is small
GAIN = 1.25  # smallest speed-up that counts; less would hardly show in the whole model
HYSTERESIS = 1.25  # sparse_from / dense_below, where the policy was tuned
CROSSOVER, ATTENTION = "crossover", "attention"  # kinds of work, see `TimeBudget`


@dataclass(frozen=True)
class LengthTiming:
    """Least seconds of attention in all sparse layers of a prefill, extrapolated from the sampled ones."""

    seqlen: int
    dense_seconds: float
    sparse_seconds: float
    low: float | None = None  # dense over sparse seconds of single turns: an interval that contains most of them
    high: float | None = None
    busy: bool = False  # whether other processes slowed the machine meanwhile


def lengths_of(model: Any, tokens: int) -> list[int]:
    """Return the lengths to time: `tokens` first, then shorter ones, then longer ones, up to the model's context."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    lengths = within(GPU_LENGTHS if on_gpu else LENGTHS, longest_prompt(model))
    shorter = sorted((length for length in lengths if length < tokens), reverse=True)
    return [tokens, *shorter, *(length for length in lengths if length > tokens)]


@torch.no_grad()
def time_lengths(
    model: Any, policy: Policy, lengths: Sequence[int], time: TimeBudget | None = None
) -> Iterator[LengthTiming]:
    """Time dense (SDPA) and the policy's attention at several lengths, in turns, on random inputs.

    The function times three layers, of the lowest, middle and highest density, and uses their mean for all. On a GPU it
    times a row of up to `ROW` calls without synchronisation between them, as in a model. Turns are repeated while it is
    unclear whether sparse is faster by `GAIN`.

    Args:
        model: a causal language model of transformers.
        policy: a policy for it.
        lengths: lengths to time, in this order.
        time: the time budget; lengths that do not fit are left out.
    """
    time = time or TimeBudget()
    plans = resolve(policy)
    parameter = next(model.parameters())
    facts = policy.model
    typical = _typical(list(plans.values()))
    row = min(ROW, len(plans)) if parameter.device.type == "cuda" else 1
    for seqlen in lengths if plans else ():
        if not time.allows(time.expects(CROSSOVER, seqlen)):
            continue
        q, k, v = (
            torch.randn(1, heads, seqlen, facts.head_dim, dtype=parameter.dtype, device=parameter.device)
            for heads in (facts.q_heads, facts.kv_heads, facts.kv_heads)
        )
        runs = [partial(_attend_densely, q, k, v), *(partial(_attend, plan, q, k, v) for plan in typical)]
        works = [partial(time.clock.work, ATTENTION, seqlen, share) for share in (1.0, *map(_weight, typical))]
        rows = [partial(_in_a_row, run, row) for run in runs]
        with time.work(CROSSOVER, seqlen):
            slowed = time.clock.watch()
            turns = Turns(rows, parameter.device, time.clock, works)
            turns.take(REPEATS if seqlen < LONG else 2)
            while turns.is_unclear(GAIN) and len(turns.seconds) < MAX_REPEATS:
                if not time.allows(sum(turns.seconds[-1])):
                    break
                turns.take(1)
        low, high = turns.interval()
        dense, *sparse = turns.least()
        layers = len(plans) / row
        yield LengthTiming(seqlen, dense * layers, statistics.mean(sparse) * layers, low, high, slowed())


class Turns:
    """Seconds of several calls that run in turns, so that changes of the machine affect all alike.

    The first call is compared with the mean of the others.
    """

    def __init__(
        self,
        runs: Sequence[Callable[[], Any]],
        device: torch.device,
        clock: Clock | None = None,
        works: Sequence[Callable[[], Any]] = (),
    ) -> None:
        self._runs, self._clock, self._works = runs, clock or Clock(), works or [nullcontext] * len(runs)
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.seconds: list[list[float]] = []  # of each turn and call
        self._turn()  # warms up

    def take(self, turns: int) -> None:
        """Take so many more turns."""
        self.seconds += [self._turn() for _ in range(turns)]

    def least(self) -> list[float]:
        """Return the least seconds of each call, since disturbances only add time."""
        return [min(each) for each in zip(*self.seconds, strict=True)]

    def interval(self) -> tuple[float, float]:
        """Return an interval for the ratio of the first call to the others, by the ranks of the turns' ratios."""
        ratios = sorted(first / statistics.mean(others) for first, *others in self.seconds)
        cut = max(0, int((len(ratios) - 2 * len(ratios) ** 0.5) / 2))
        return ratios[cut], ratios[-1 - cut]

    def is_unclear(self, limit: float) -> bool:
        """Return whether the interval contains a limit."""
        low, high = self.interval()
        return low < limit < high

    def _turn(self) -> list[float]:
        seconds = []
        for run, work in zip(self._runs, self._works, strict=True):
            self._wait()
            start = self._clock.now()
            with work():
                run()
                self._wait()
            seconds.append(self._clock.now() - start)
        return seconds


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


def _weight(plan: LayerPlan) -> float:
    """Return the mean budget of a plan's heads."""
    selectors = [getattr(group.rule, "selector", None) for group in plan.groups]
    budgets = [0.0 if each is None else getattr(each, each.budget_field) for each in selectors]
    flat = [x for budget in budgets for x in (budget if isinstance(budget, tuple) else (budget,))]
    return sum(flat) / max(1, len(flat))


def _typical(plans: list[LayerPlan]) -> list[LayerPlan]:
    """Return the plans with the lowest, middle and highest budget."""
    ordered = sorted(plans, key=_weight)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]] if plans else []


def is_faster(timing: LengthTiming) -> bool:
    """Return whether sparse is faster at a length by enough to count."""
    return timing.dense_seconds >= GAIN * timing.sparse_seconds


def dense_below(timings: Sequence[LengthTiming]) -> int | None:
    """Return the shortest measured length from which sparse stays faster, or None if it is slower at the longest."""
    border = None
    for timing in sorted(timings, key=lambda each: -each.seqlen):
        if not is_faster(timing):
            break
        border = timing.seqlen
    return border
