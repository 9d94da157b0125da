# SPDX-License-Identifier: Apache-2.0
"""Turn costs into the policy for a density, and find the sparsest policy within a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.tune.costs import Allocator
from dynaxx.video.policy import VideoPolicy, VideoRule
from dynaxx.video.tune.costs import Case, Costs, Space, measure_costs, policy_of, run_with
from dynaxx.video.tune.sampling import MAX_PSNR, Sample, Sampler, psnr, relative_error

TRUSTS = (0.0, 0.5, 1.0)  # how far differences between cells are trusted; the latents decide
FACTORS = (4.0, 0.25, 2.0, 0.5)  # tried on the losses of each part of the denoising and each group of layers


class Trial(NamedTuple):
    """A policy that was run: its density, and how far its latents are from the dense ones, averaged over cases."""

    density: float
    psnr: float
    error: float
    policy: VideoPolicy


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
        # A cell counts by its share of the steps. Its loss is already that of all its steps.
        parts = [(last - first) * len(space.ranges) for first, last in space.ranges]
        self._density = self.costs.density * self.costs.density.new_tensor(parts)[None, :, None, None]

    @property
    def least_density(self) -> float:
        """Return the smallest mean density."""
        return float(self._density.flatten(1).amin(0).mean())

    def best(self, density: float) -> Trial:
        """Return the trial of the best policy at a mean density, among those of all `TRUSTS`."""
        losses = (_tempered(self.costs.loss, trust) for trust in TRUSTS)
        return max((self._trial(density, loss) for loss in losses), key=lambda found: found.psnr)

    def refined(self, density: float) -> Trial:
        """Return a better trial than `best`: weights of parts and of groups of layers change while the PSNR grows."""
        losses = [_tempered(self.costs.loss, trust) for trust in TRUSTS]
        trials = [self._trial(density, loss) for loss in losses]
        best, loss = max(zip(trials, losses, strict=True), key=lambda pair: pair[0].psnr)
        _, ranges, layers, _ = loss.shape
        at_layers = torch.arange(layers, device="cpu").chunk(min(self.space.groups, layers))
        cells = [*((part, slice(None)) for part in range(ranges)), *((slice(None), group) for group in at_layers)]
        for factor, (part, group) in product(FACTORS, cells):
            changed = loss.clone()
            changed[:, part, group] *= factor
            found = self._trial(density, changed)
            if found.psnr > best.psnr and found.density <= 1.005 * max(density, best.density):
                best, loss = found, changed
        return best

    def _trial(self, density: float, loss: Tensor) -> Trial:
        """Run the policy of least loss (candidates, ranges, layers, heads) at a mean density."""
        allocator = Allocator(self._density.flatten(1), loss.flatten(1))
        choice = allocator.at(max(density, allocator.least_density)).choice.view(loss.shape[1:])
        policy = policy_of(self.sampler, self.space, list(self._rules(choice)))
        return trial(self.sampler, policy, self.cases, self.dense)

    def _rules(self, choice: Tensor) -> Iterator[VideoRule]:
        """Yield the rules of a choice of candidates, (ranges, layers, heads)."""
        for steps, of_layers in zip(self.space.ranges, choice.tolist(), strict=True):
            for layer, of_heads in enumerate(of_layers):
                for index in sorted(set(of_heads)):
                    rule = self.space.candidates[index]
                    heads = tuple(head for head, chosen in enumerate(of_heads) if chosen == index)
                    if rule is not None:
                        yield VideoRule.of(rule, layers=(layer,), heads=heads, steps=steps)

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
    made = [run_with(sampler, policy, case) for case in cases]
    pairs = [(found.latents, expected.latents) for (found, _), expected in zip(made, dense, strict=True)]
    mean = lambda values: sum(values) / len(cases)
    return Trial(
        mean([density for _, density in made]),
        mean([psnr(*pair) for pair in pairs]),
        mean([relative_error(*pair) for pair in pairs]),
        policy,
    )
