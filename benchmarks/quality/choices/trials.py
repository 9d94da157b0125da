# SPDX-License-Identifier: Apache-2.0
"""Costs of heads, budgets from them, and trials on held-out text for any way to choose."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from benchmarks.quality.choices.masked import Dense, attend, heads_first, probabilities, with_ones
from benchmarks.quality.choices.ways import GRIDS, Choice, OwnMasses, extra_pairs, grid_of, kept_blocks, ranked

from dynaxx.lab.attention_route import routed
from dynaxx.lab.perplexity import token_losses
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.sensitivity import fisher_gradient

NAME = "dynaxx_choices"
ONE_BUDGET = ", one "  # in the name of a choice: one budget for all heads
ALL_KINDS = ", all kinds"  # budgets from the costs on all kinds of text, the evaluated one included
DENSITIES = (0.8, 0.6, 0.48, 0.38, 0.3, 0.24, 0.19, 0.15, 0.12, 0.1, 0.08, 0.06, 0.045, 0.03)
START = {False: 5, True: 4}  # index of the first density, by whether it is decoding


@dataclass
class Plan:
    """The parameters of every layer and head for some choices. A head sees the union of its choices."""

    choices: tuple[Choice, ...]
    amounts: torch.Tensor  # (choices, layers, heads)
    masses: OwnMasses = field(default_factory=OwnMasses)


@dataclass
class Late:
    """The later rows of a layer, of which each chooses pages by itself.

    The cost of a row needs the products of its values with its gradient only, so a page is two numbers: its mass and
    the sum of its products.
    """

    p: torch.Tensor  # (H, rows, N)
    slopes: torch.Tensor  # (H, rows, N): gradient . value

    def of_pages(self, size):
        """Return the mass and the sum of products of each page, both (H, rows, pages)."""
        pages = lambda x: x.unflatten(-1, (-1, size)).sum(-1)
        return pages(self.p), pages(self.p * self.slopes)

    def errors(self, page, kept):
        """Return gradient . (sparse - dense output) of each row, (H, rows)."""
        mass, product = page
        seen = (mass * kept).sum(-1).clamp(min=1e-30)
        return (product * kept).sum(-1) / seen - product.sum(-1)


@torch.no_grad()
def losses_of(model, ids, plan):
    """Return the loss of every next token under a plan, and the density of every layer and head."""
    visited = []

    def run(module, query, key, value, attention_mask, **kwargs):
        q, k, v = heads_first(query, key, value)
        scale, tokens = q.shape[2] ** -0.5, q.shape[1]
        p, layer = probabilities(q, k, scale), module.layer_idx
        plan.masses.read(layer, plan.choices, q, k, scale)
        blocks = None
        for i, choice in enumerate(plan.choices):
            values = ranked(choice, plan.masses.of(layer, choice, q, k, p, scale), k, v)
            kept = kept_blocks(choice, values, plan.amounts[i, layer], tokens)
            blocks = kept if blocks is None else blocks | kept
        visible, _, count = grid_of(plan.choices[0], tokens, q.device)
        rows = slice(len(count) // 2, None) if plan.choices[0].decode else slice(None)
        share = blocks[:, rows].sum((1, 2)) / visible[rows].sum()
        visited.append(share + extra_pairs(plan.choices[0], share))
        dense = Dense(q, k, with_ones(v), p, scale)
        return attend(dense, blocks, plan.choices[0]).transpose(0, 1)[None].to(query.dtype), None

    with routed(model, NAME, run):
        losses = token_losses(model, ids)[0]
    return losses, torch.stack(visited)


def costs_of(model, ids, choices, seed=0, masses=None):
    """Return per choice (loss, density), each (amounts, layers, heads), by one forward and one backward pass."""
    masses = masses or OwnMasses()
    layers = model.config.num_hidden_layers
    found = {choice: [None] * layers for choice in choices}

    def run(module, query, key, value, attention_mask, **kwargs):
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
        out = out.transpose(1, 2)
        if not out.requires_grad:
            out.requires_grad_()
        saved = [each.detach() for each in (query, key, value)]
        q, k, _ = heads_first(*saved)
        masses.read(module.layer_idx, choices, q, k, q.shape[2] ** -0.5)
        out.register_hook(lambda grad: measure(module.layer_idx, saved, grad))
        return out, None

    @torch.no_grad()
    def measure(layer, saved, grad):
        q, k, v = heads_first(*saved)
        grad = grad[0].transpose(0, 1).float()  # (H, N, D)
        scale, tokens = q.shape[2] ** -0.5, q.shape[1]
        p = probabilities(q, k, scale)
        half = torch.float16 if p.is_cuda else p.dtype
        # half precision: errors of 5e-4 are small beside the costs
        if any(choice.decode for choice in choices):
            slopes = grad[:, tokens // 2 :] @ v.transpose(1, 2).repeat_interleave(q.shape[0] // v.shape[0], 0)
            late = Late(p[:, tokens // 2 :], slopes)
        else:
            dense = Dense(q, k, with_ones(v).to(half), p.to(half), scale)
            out = attend(dense, None, choices[0])
        for choice in choices:
            visible, _, count = grid_of(choice, tokens, q.device)
            values = ranked(choice, masses.of(layer, choice, q, k, p, scale), k, v)
            rows = slice(len(count) // 2, None) if choice.decode else slice(None)
            page = late.of_pages(choice.kv_block) if choice.decode else None
            loss, density = [], []
            for amount in GRIDS[choice.rule]:
                blocks = kept_blocks(choice, values, torch.full((q.shape[0],), amount), tokens)
                if page is None:
                    error = ((attend(dense, blocks, choice) - out) * grad).sum(-1)
                else:
                    error = late.errors(page, blocks[:, rows])
                loss.append((error.double() ** 2).sum(1) / (2 * tokens))
                share = blocks[:, rows].sum((1, 2)).double() / visible[rows].sum()
                density.append(share + extra_pairs(choice, share))
            found[choice][layer] = torch.stack(loss).cpu(), torch.stack(density).cpu()

    learning = [each for each in model.parameters() if each.requires_grad]
    for each in learning:
        each.requires_grad_(False)
    with routed(model, NAME, run), torch.enable_grad():
        hidden = model.base_model(ids[:, :-1].to(model.device), use_cache=False)[0]
        hidden.backward(fisher_gradient(model, hidden.detach(), seed))
    for each in learning:
        each.requires_grad_(True)
    return {
        choice: (torch.stack([a for a, _ in rows], 1), torch.stack([b for _, b in rows], 1))
        for choice, rows in found.items()
    }


def measured(choice):
    """Return the choice whose costs serve a choice."""
    return replace(choice, dense_layers=())


def allocation(choices, costs, density, kv_heads):
    """Return the amounts (choices, layers, heads) of the best allocation at a mean density."""
    loss, visited = (torch.cat([costs[measured(each)][i] for each in choices]) for i in (0, 1))
    for layer in choices[0].dense_layers:  # loss and visited are (candidates, layers, heads)
        loss = loss.clone()
        loss[:, layer] += torch.where(visited[:, layer] < visited[:, layer].amax(0), 1e3, 0.0)
    heads = loss.shape[2]
    tied = choices[0].group
    if tied:
        loss = loss.unflatten(2, (kv_heads, -1)).sum(-1)
        visited = visited.unflatten(2, (kv_heads, -1)).mean(-1)
    found = Allocator(visited.flatten(1), loss.flatten(1)).at(density)
    where = found.choice.view(loss.shape[1:])
    if tied:
        where = where.repeat_interleave(heads // kv_heads, 1)
    amounts, start = [], 0
    for choice in choices:
        grid = torch.tensor(GRIDS[choice.rule])
        index = where - start
        inside = (index >= 0) & (index < len(grid))
        amounts.append(torch.where(inside, grid[index.clamp(0, len(grid) - 1)], torch.tensor(-1.0)))
        start += len(grid)
    return torch.stack(amounts)


def uniform_amounts(choice, costs, density):
    """Return one amount for all heads with a mean density, by interpolation."""
    grid, visited = GRIDS[choice.rule], costs[choice][1].mean((1, 2)).tolist()
    _, layers, heads = costs[choice][1].shape
    for (a, x), (b, y) in pairwise(zip(grid, visited, strict=True)):
        if density <= y:
            share = (density - x) / max(y - x, 1e-9)
            amount = a + (b - a) * share if b != math.inf else a
            return torch.full((1, layers, heads), amount)
    return torch.full((1, layers, heads), grid[-1])


def mean_costs(costs, kinds):
    return {
        choice: tuple(torch.stack([costs[kind][choice][i] for kind in kinds]).mean(0) for i in (0, 1))
        for choice in costs[kinds[0]]
    }


def curve(trial_at, tolerance, start):
    """Return the trials around the density at which the worst kind rises by the tolerance, from dense to sparse.

    Args:
        trial_at: a function from a density to its trial.
        tolerance: the permitted rise.
        start: index of the first density in `DENSITIES`.
    """
    trials, at = {}, start
    while 0 <= at < len(DENSITIES) and at not in trials:
        trials[at] = trial_at(DENSITIES[at])
        above = trials[at]["rise"] > tolerance
        if not above and trials[at]["density"] > 1.3 * trials[at]["target"]:
            break  # no fewer blocks can be had
        at += -1 if above else 1
    return [trials[at] for at in sorted(trials)]


def trial(setting, choices, costs, density, name):
    """Return the rise on each kind of text at a density, with budgets from the others, or from all for `ALL_KINDS`."""

    def plan_for(kind):
        others = mean_costs(costs, [each for each in setting.kinds if each != kind or ALL_KINDS in name] or [kind])
        if ONE_BUDGET in name:
            amounts = uniform_amounts(choices[0], others, density)
        else:
            amounts = allocation(choices, others, density, setting.model.config.num_key_value_heads)
        return Plan(choices, amounts.to(setting.model.device))

    return tried(setting, plan_for, density, choices[0].decode)


def tried(setting, plan_for, density, second_half=False):
    """Return the rise on each kind of held-out text under a plan for each kind.

    Args:
        setting: model and texts.
        plan_for: a function from a kind to its plan.
        density: the density that the plans aim at.
        second_half: whether only tokens of the second half count.
    """
    kinds, visited = {}, {}
    for kind, texts in setting.texts.items():
        plan = plan_for(kind)
        rises, seen = [], []
        for ids, before in zip(texts, setting.dense[kind], strict=True):
            losses, share = losses_of(setting.model, ids, plan)
            rise = losses - before
            rises.append((rise[rise.shape[0] // 2 :] if second_half else rise).double().cpu())
            seen.append(float(share.mean()))
        rise = torch.cat(rises)
        kinds[kind] = (float(rise.mean()), float(rise.std() / rise.numel() ** 0.5))
        visited[kind] = sum(seen) / len(seen)
    worst = max(kinds, key=lambda each: kinds[each][0])
    return {
        "target": density,
        "density": sum(visited.values()) / len(visited),
        "densities": visited,
        "worst": worst,
        "rise": math.expm1(kinds[worst][0]),
        "rises": {kind: [math.expm1(a), b] for kind, (a, b) in kinds.items()},
    }


def needed(rows, tolerance):
    """Return the density at which the worst kind reaches the tolerance, log-log between two rows, or None."""
    for a, b in pairwise(rows):
        if a["rise"] <= tolerance < b["rise"]:
            low, high = (math.log(max(each["rise"], 1e-5)) for each in (a, b))
            share = (math.log(tolerance) - low) / (high - low)
            return a["density"] * (b["density"] / a["density"]) ** share
    return None
