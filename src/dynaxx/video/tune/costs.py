# SPDX-License-Identifier: Apache-2.0
"""Measure what each candidate rule costs each head of each layer in each part of the denoising.

One forward pass per part is measured: the first one past its middle. A head's cost is the squared error that it makes
in its layer's output, after the output projection, as a share of the squared output: costs of a layer's heads add up.
How much an error in a layer and a part matters to the final latents is measured too, by a run in which only these are
sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.layout import as_block_size
from dynaxx.policy import ModelFacts
from dynaxx.policy.resolve import plan_of
from dynaxx.policy.specs import AttentionRule
from dynaxx.video.attention import attend
from dynaxx.video.diffusers.families import attention_modules, model_facts, original
from dynaxx.video.diffusers.handle import Handle, Watcher, apply
from dynaxx.video.policy import VideoPolicy, VideoRule
from dynaxx.video.tune.sampling import Sample, Sampler, relative_error

Ranges = tuple[tuple[float, float], ...]
Case = tuple[str, int]  # prompt and seed


@dataclass(frozen=True)
class Space:
    """The candidates among which a search chooses."""

    candidates: tuple[AttentionRule | None, ...]  # rules, then None, which is dense
    ranges: Ranges = ((0.0, 0.2), (0.2, 0.6), (0.6, 1.0))  # parts of the denoising, in shares
    block_size: int = 64  # tokens per block
    order: Any = "bars"  # the order of tokens
    groups: int = 4  # number of groups of neighbouring layers whose weights are measured
    every: tuple[float, ...] = (0.1, 0.2, 0.4)  # shares of the steps between refreshes that are tried; empty for none


class Costs(NamedTuple):
    """Measured costs; a cell is a head of a layer in a part of the denoising."""

    density: Tensor  # (candidates, ranges, layers, heads)
    loss: Tensor  # (candidates, ranges, layers, heads), weighted by how much it matters to the latents


def policy_of(sampler: Sampler, space: Space, rules: Sequence[VideoRule], **fields: Any) -> VideoPolicy:
    """Return a policy for the pipeline's transformers."""
    facts = model_facts(sampler.models[0])
    return VideoPolicy(model=facts, block_size=space.block_size, order=space.order, rules=tuple(rules), **fields)


def ranges_of(switch: float) -> Ranges:
    """Return parts of the denoising, one of which ends where the second transformer takes over."""
    edges = [0.2, 0.6]
    if 0.0 < switch < 1.0:
        edges[min(range(2), key=lambda at: abs(edges[at] - switch))] = switch
    return (0.0, edges[0]), (edges[0], edges[1]), (edges[1], 1.0)


def applied(stack: ExitStack, sampler: Sampler, policy: VideoPolicy) -> list[Handle]:
    """Return handles of a policy in each of the pipeline's transformers."""
    return [stack.enter_context(apply(model, policy, scheduler=sampler.scheduler)) for model in sampler.models]


def run_with(sampler: Sampler, policy: VideoPolicy, case: Case, *, decode: bool = False) -> tuple[Sample, float]:
    """Return what the pipeline makes under a policy, and the visited share of blocks over all steps."""
    with ExitStack() as stack:
        handles = applied(stack, sampler, policy)
        made = sampler.sample(*case, decode=decode)
        calls = [sum(handle.counts.values()) for handle in handles]
        visited = sum(handle.density() * count for handle, count in zip(handles, calls, strict=True))
        return made, visited / sum(calls)


def measure_costs(sampler: Sampler, space: Space, cases: Sequence[Case], dense: Sequence[Sample]) -> Costs:
    """Measure the costs of all candidates.

    Args:
        sampler: the pipeline.
        space: the candidates.
        cases: prompts and seeds.
        dense: the dense results of the cases, in their order.
    """
    density, error = _local_costs(sampler, space, cases)
    probe = int(
        density[:-1].flatten(1).mean(1).argsort()[(len(space.candidates) - 2) // 2]
    )  # by it weights are measured
    weights = torch.zeros_like(error[0, :, :, 0])
    count = min(space.groups, error.shape[2])
    groups = [tuple(group.tolist()) for group in torch.arange(error.shape[2], device="cpu").chunk(count)]
    for (at, steps), layers in product(enumerate(space.ranges), groups):
        rule = VideoRule.of(space.candidates[probe], layers=layers, steps=steps)
        found = [run_with(sampler, policy_of(sampler, space, [rule]), case)[0] for case in cases]
        change = sum(relative_error(a.latents, b.latents) ** 2 for a, b in zip(found, dense, strict=True)) / len(cases)
        weights[at, list(layers)] = change / float(error[probe, at, list(layers)].sum().clamp(min=1e-12))
    return Costs(density, error * weights[None, :, :, None])


@torch.no_grad()
def _local_costs(sampler: Sampler, space: Space, cases: Sequence[Case]) -> tuple[Tensor, Tensor]:
    """Return the density and the error of every candidate and cell, each (candidates, ranges, layers, heads)."""
    facts = model_facts(sampler.models[0])
    shape = (len(space.candidates), len(space.ranges), facts.layers, facts.q_heads)
    density = torch.ones(shape, dtype=torch.float32, device="cpu")
    error, calls = torch.zeros_like(density), torch.zeros_like(density[0, :, :, 0])
    density[:-1] = 0.0
    block_size = as_block_size(space.block_size)
    plans = [
        plan_of([rule] * facts.q_heads, facts.kv_heads, block_size, causal=False) for rule in space.candidates[:-1]
    ]
    parts = [VideoRule.of(None, steps=steps) for steps in space.ranges]  # dense, so that the handle knows the step
    measured: dict[int, float] = {}  # share of the steps at which each range is measured

    def watcher(handle: Handle, model: nn.Module) -> Watcher:
        projections = [projection_of(module, facts) for _, module in attention_modules(original(model))]

        def watch(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, _: Any) -> None:
            share = handle.share or 0.0
            at = next(i for i, (first, last) in enumerate(space.ranges) if first <= share < last)
            middle = sum(space.ranges[at]) / 2
            if share < middle or measured.setdefault(at, share) != share:
                return
            calls[at, layer] += 1
            gram = projections[layer].to(out.device)
            whole = energy(out, gram).sum()
            for index, plan in enumerate(plans):
                found, layout = attend(q, k, v, handle.grid(q), plan)
                error[index, at, layer] += (energy(found - out, gram) / whole).cpu()
                visited = layout.kv_num_blocks.float().mean((0, 2)).cpu() / layout.kv_blocks
                density[index, at, layer] += visited

        return watch

    with ExitStack() as stack:
        handles = applied(stack, sampler, policy_of(sampler, space, parts))
        for handle, model in zip(handles, sampler.models, strict=True):
            handle.watchers.append(watcher(handle, model))
        for case in cases:
            measured.clear()
            sampler.sample(*case)
    calls = calls.clamp(min=1)[None, :, :, None]
    density[:-1] /= calls
    return density, error / calls


def projection_of(module: Any, facts: ModelFacts) -> Tensor:
    """Return (heads, head_dim, head_dim): W^T W of each head's part W of the output projection, or identities."""
    linear = module.to_out[0] if getattr(module, "to_out", None) is not None else None
    if linear is None or linear.in_features != facts.q_heads * facts.head_dim:
        return torch.eye(facts.head_dim, dtype=torch.float32, device="cpu").expand(facts.q_heads, -1, -1)
    weight = linear.weight.detach().float().unflatten(1, (facts.q_heads, facts.head_dim))
    return torch.einsum("ohi,ohj->hij", weight, weight)


def energy(x: Tensor, gram: Tensor) -> Tensor:
    """Return (heads,) squared norms of (batch, seqlen, heads, head_dim) after each head's output projection."""
    x = x.float()
    return (torch.einsum("bshi,hij->bshj", x, gram) * x).sum((0, 1, 3))
