# SPDX-License-Identifier: Apache-2.0
"""Turn costs into the policy for a density, and find the sparsest policy within a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.tune.costs import Allocator
from dynaxx.patterns import Full
from dynaxx.video.policy import VideoPolicy, VideoRule
from dynaxx.video.tune.costs import Case, Costs, Space, measure_costs, policy_of, run_with
from dynaxx.video.tune.sampling import MAX_PSNR, Sample, Sampler, psnr, relative_error, ssim

TRUSTS = (0.5, 0.0, 1.0)  # how far differences between cells are trusted; the latents decide
PROBE = 0.15  # density at which a search chooses how to share residuals
DRIFTS = (0.05, 0.2)  # error between refreshes as a share of the rule's own: tried, too
FACTORS = (4.0, 0.25, 2.0, 0.5)  # tried on the losses of each part of the denoising and each group of layers


class Trial(NamedTuple):
    """A policy that was run: its density, and how far its latents are from the dense ones, averaged over cases."""

    density: float
    psnr: float
    error: float
    policy: VideoPolicy


class Sharing(NamedTuple):
    """How layers share residuals: cells choose pairs of a rule and a denser one for refreshes."""

    every: float  # share of the steps from one refresh to the next
    drift: float  # error between refreshes, as a share of the rule's own


class Search:
    """Costs of a pipeline, and the policies that they give.

    Args:
        sampler: the pipeline.
        space: the candidates.
        cases: prompts and seeds to tune on.
    """

    def __init__(self, sampler: Sampler, space: Space, cases: Sequence[Case]) -> None:
        self.sampler, self.space, self.cases = sampler, space, cases
        self.dense = [run_with(sampler, policy_of(sampler, space, []), case)[0] for case in cases]
        self.costs: Costs = measure_costs(sampler, space, cases, self.dense)
        shares = [index / len(sampler.scheduler.timesteps) for index in range(len(sampler.scheduler.timesteps))]
        steps = [sum(first <= share < last for share in shares) for first, last in space.ranges]
        self._steps = torch.tensor(steps, dtype=torch.float32, device="cpu")  # of each part
        order = self.costs.density.flatten(1).mean(1)
        pairs = [(few, more) for few, more in product(range(len(order)), repeat=2) if order[few] < order[more]]
        self._pairs = torch.tensor(pairs, dtype=torch.int64, device="cpu")
        self._ways: list[Sharing | None] = [None, *(Sharing(*way) for way in product(space.every, DRIFTS))]
        self._way = self._best(PROBE, self._ways)[2] if space.every else None

    @property
    def least_density(self) -> float:
        """Return the smallest mean density of policies without refreshes."""
        return float(self._of_steps(self.costs.density).flatten(1).amin(0).mean())

    def best(self, density: float) -> Trial:
        """Return the trial of the best policy at a mean density, among those of all `TRUSTS`."""
        return self._best(density, [self._way])[0]

    def refined(self, density: float) -> Trial:
        """Return a better trial than `best`: weights of parts and of groups of layers change while the PSNR grows."""
        best, loss, sharing = self._best(density, self._ways)
        _, ranges, layers, _ = loss.shape
        at_layers = torch.arange(layers, device="cpu").chunk(min(self.space.groups, layers))
        cells = [*((part, slice(None)) for part in range(ranges)), *((slice(None), group) for group in at_layers)]
        for factor, (part, group) in product(FACTORS, cells):
            changed = loss.clone()
            changed[:, part, group] *= factor
            found = self._trial(density, changed, sharing)
            if found.psnr > best.psnr and found.density <= 1.005 * max(density, best.density):
                best, loss = found, changed
        return best

    def _best(self, density: float, ways: Sequence[Sharing | None]) -> tuple[Trial, Tensor, Sharing | None]:
        """Return the best trial, with the losses and the sharing of its policy: sharing is chosen before trust."""
        middle, *others = (_tempered(self.costs.loss, trust) for trust in TRUSTS)
        tried = [(self._trial(density, middle, way), middle, way) for way in ways]
        way = max(tried, key=lambda found: found[0].psnr)[2]
        tried += [(self._trial(density, loss, way), loss, way) for loss in others]
        return max(tried, key=lambda found: found[0].psnr)

    def _of_steps(self, density: Tensor) -> Tensor:
        """Weigh densities (candidates, ranges, layers, heads) by the steps of each part; losses are already of all."""
        return density * (self._steps / self._steps.mean())[None, :, None, None]

    def _trial(self, density: float, loss: Tensor, sharing: Sharing | None) -> Trial:
        """Run the policy of least loss (candidates, ranges, layers, heads) at a mean density."""
        each = self.costs.density
        if sharing is not None:
            few, more = self._pairs.T
            count = [math.ceil((last - first) / sharing.every - 1e-6) for first, last in self.space.ranges]
            refreshes = torch.tensor(count, dtype=torch.float32, device="cpu") / self._steps.clamp(min=1)
            each = each[few] + each[more] * refreshes.clamp(max=1)[None, :, None, None]
            loss = loss[more] + sharing.drift * loss[few]
        allocator = Allocator(self._of_steps(each).flatten(1), loss.flatten(1))
        choice = allocator.at(max(density, allocator.least_density)).choice.view(loss.shape[1:])
        rules, every = list(self._rules(choice, sharing)), 0.0 if sharing is None else sharing.every
        policy = policy_of(self.sampler, self.space, rules, refresh_every=every)
        return trial(self.sampler, policy, self.cases, self.dense)

    def _rules(self, choice: Tensor, sharing: Sharing | None) -> Iterator[VideoRule]:
        """Yield the rules of a choice of candidates or pairs, (ranges, layers, heads)."""
        for steps, of_layers in zip(self.space.ranges, choice.tolist(), strict=True):
            for layer, of_heads in enumerate(of_layers):
                for index in sorted(set(of_heads)):
                    few, more = (index, None) if sharing is None else self._pairs[index].tolist()
                    rule = self.space.candidates[few]
                    denser = None if more is None else self.space.candidates[more] or Full()
                    heads = tuple(head for head, chosen in enumerate(of_heads) if chosen == index)
                    if rule is not None:
                        yield VideoRule.of(rule, layers=(layer,), heads=heads, steps=steps, refresh=denser)

    def sparsest(self, limit: float, rounds: int = 6, say: Callable[[Trial], None] | None = None) -> list[Trial]:
        """Return the trials of a bisection for the sparsest policy with a PSNR of at least `limit` dB.

        The last trial is the best one within the limit, or the dense policy if there is none.
        """
        low, high = self.least_density, 1.0
        best = Trial(1.0, MAX_PSNR, 0.0, policy_of(self.sampler, self.space, []))
        trials: list[Trial] = []
        tried = low
        while len(trials) < rounds and high > 1.05 * low:
            found = self.best(tried)
            trials.append(found)
            if say is not None:
                say(found)
            if found.psnr >= limit:
                best, high = found, tried
            else:
                low = tried
            tried = (low * high) ** 0.5
        if high < 1.0:
            trials.append(self.refined(high))
            best = max(best, trials[-1], key=lambda found: found.psnr)
        return [*trials, best]


def _tempered(loss: Tensor, trust: float) -> Tensor:
    """Return losses (candidates, ranges, layers, heads) between those of all cells alike, at 0.0, and their own."""
    log = loss.clamp(min=1e-30).log()
    mean = log.flatten(1).mean(1)[:, None, None, None]
    return torch.where(loss > 0, (trust * log + (1 - trust) * mean).exp(), 0.0)


def trial(sampler: Sampler, policy: VideoPolicy, cases: Sequence[Case], dense: Sequence[Sample]) -> Trial:
    """Run a policy on some cases, and compare its latents with the dense ones."""
    found = compared([run_with(sampler, policy, case) for case in cases], dense)
    return Trial(found["density"], found["psnr"], found["error"], policy)


def compared(made: Sequence[tuple[Sample, float]], dense: Sequence[Sample]) -> dict[str, float]:
    """Return means over results, each with its density: density, PSNR, error, and PSNR and SSIM of decoded frames."""
    rows = []
    for (found, density), expected in zip(made, dense, strict=True):
        row = {
            "density": density,
            "psnr": psnr(found.latents, expected.latents),
            "error": relative_error(found.latents, expected.latents),
        }
        if found.frames is not None and expected.frames is not None:
            row["frames_psnr"] = psnr(found.frames, expected.frames)
            row["ssim"] = ssim(found.frames, expected.frames)
        rows.append(row)
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
