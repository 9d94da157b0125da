# SPDX-License-Identifier: Apache-2.0
"""Measure how many blocks each way to choose them needs, at equal perplexity on kinds of text that tuning has not seen.

    python benchmarks/quality/choices.py smollm2 --device cuda --out choices.json --json

Attention is computed densely and masked to the chosen blocks, so any way to choose can be compared, whether or not a
kernel exists for it. "mass" knows the true attention of every query and bounds what a scorer of blocks can reach.

For each kind of text, the budgets of the heads come from the costs of the heads on the other four kinds
(`dynaxx.lab.tune`), and the left-out kind's held-out half is evaluated. The result is the density at which the worst of
the five kinds rises by the tolerance. `--out` stores every trial, and a run with an existing file continues it.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch

from dynaxx.lab.attention_route import evaluating, routed
from dynaxx.lab.kinds import KINDS, text_of
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import token_losses
from dynaxx.lab.texts import encode, split_text
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.sensitivity import fisher_gradient

NAME = "dynaxx_choices"
PADDED = 64  # columns beside the values, aligned for matrix products
SHOWN = 0.24  # density at which the table shows each kind of text
ONE_BUDGET = ", one "  # in the name of a choice: one budget for all heads
ALL_KINDS = ", all kinds"  # budgets from the costs on all kinds of text, the evaluated one included
LAST = 64  # queries at the end that see everything
GRIDS = {
    "share": (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
    "top_p": (0.0, 0.5, 0.65, 0.75, 0.83, 0.89, 0.93, 0.96, 0.98, 0.993, 1.0),
    "even": (0.0, 0.06, 0.12, 0.25, 0.5, 0.8, 1.3, 2.2, 4.0, 10.0, math.inf),  # 1 / share of an even spread
}
DENSITIES = (0.8, 0.6, 0.48, 0.38, 0.3, 0.24, 0.19, 0.15, 0.12, 0.1, 0.08, 0.06, 0.045, 0.03)
START = {False: 5, True: 9}  # index of the first density, by whether it is decoding


@dataclass(frozen=True)
class Choice:
    """A way to choose blocks.

    Attributes:
        q_block, kv_block: tokens per block.
        scorer: "mass" for true attention, "mean N" for mean queries of N tokens, "spread N" with the variance of their
            logits, "bound" for bounds of keys.
        rule: "share" keeps a share of the visible blocks of every row, "top_p" blocks up to a share of the mass, "even"
            blocks with a multiple of the mass of an even spread.
        local: tokens before each q block that are always visible.
        sharpness: factor on the scores.
        group: whether the q heads of a kv head choose together, with one budget.
        values: whether a block's mass counts by the length of its mean value.
        last: queries at the end that see everything.
        decode: whether only queries of the second half choose, and all others see everything.
        omitted: what stands in for omitted blocks in the same softmax: "" for nothing, "means" for the mean key and
            value of each, "query" for what the row's mean query reads in them, with its logits, "query share" with its
            share of the mass, "row" for what the row's middle query reads in them, with its share.
        dense_layers: layers that see everything; negative ones count from the last.
    """

    q_block: int = 32
    kv_block: int = 32
    scorer: str = "mean 32"
    rule: str = "share"
    local: int = 96
    sharpness: float = 0.75
    group: bool = False
    values: bool = False
    last: int = LAST
    decode: bool = False
    omitted: str = ""
    dense_layers: tuple[int, ...] = ()


@dataclass
class Dense:
    """Queries, keys, values and the dense attention of a layer."""

    q: torch.Tensor  # (H, N, D)
    k: torch.Tensor  # (Hk, N, D)
    v: torch.Tensor  # (Hk, N, D + PADDED), `with_ones` of the values
    p: torch.Tensor  # (H, N, N)
    scale: float

    @property
    def lse(self):
        """(H, N): the logarithm of the sum of each row, from its largest probability."""
        largest, where = self.p.max(-1)
        keys = self.k.float().repeat_interleave(self.q.shape[0] // self.k.shape[0], 0)
        found = keys.gather(1, where[..., None].expand(-1, -1, keys.shape[2]))
        return (self.q.float() * found).sum(-1) * self.scale - largest.float().log()


@dataclass
class Plan:
    """The parameters of every layer and head for some choices. A head sees the union of its choices."""

    choices: tuple[Choice, ...]
    amounts: torch.Tensor  # (choices, layers, heads)


@lru_cache(maxsize=32)
def grid_of(choice, tokens, device):
    """Return (visible, forced) (R, C) bool and (R,) the number of visible blocks."""
    rows = torch.arange(-(-tokens // choice.q_block), device=device)
    cols = torch.arange(-(-tokens // choice.kv_block), device=device)
    first, last = rows * choice.q_block, (rows * choice.q_block + choice.q_block).clamp(max=tokens) - 1
    visible = cols * choice.kv_block <= last[:, None]
    forced = (cols + 1) * choice.kv_block > first[:, None] - choice.local
    forced |= (cols * choice.kv_block < 32) | (last[:, None] >= tokens - choice.last)
    if choice.decode:
        forced |= (first < tokens // 2)[:, None]
    return visible, forced & visible, visible.sum(1)


@lru_cache(maxsize=4)
def hidden_of(tokens, device):
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def probabilities(q, k, scale):
    """Return the dense attention (H, N, N) of (H, N, D) queries and (Hk, N, D) keys."""
    group = q.shape[0] // k.shape[0]
    logits = torch.matmul(q.view(k.shape[0], -1, q.shape[2]) * scale, k.transpose(1, 2)).view(
        q.shape[0], q.shape[1], -1
    )
    logits.masked_fill_(hidden_of(q.shape[1], q.device), -torch.inf)
    assert group * k.shape[0] == q.shape[0]
    return torch.softmax(logits, -1)


def block_mass(choice, p):
    """Return the mean share of every block's mass over the queries of its row, (H, R, C)."""
    heads, tokens, _ = p.shape
    return p.view(heads, tokens // choice.q_block, choice.q_block, -1, choice.kv_block).sum((2, 4)) / choice.q_block


def estimated(choice, q, k, scale):
    """Return the mass of every block as a scorer estimates it, (H, R, C), of sum 1 per row."""
    heads, tokens, dim = q.shape
    visible = grid_of(choice, tokens, q.device)[0]
    kind, _, size = choice.scorer.partition(" ")
    if kind in ("mean", "spread"):
        tile = int(size)
        tiles = q.view(heads, tokens // tile, tile, dim)
        queries = tiles.mean(2) * (scale * choice.sharpness)
        logits = torch.matmul(queries.view(k.shape[0], -1, dim), k.transpose(1, 2)).view(heads, -1, tokens)
        if kind == "spread":  # the mean of an exponential of normal logits; dimensions count as independent
            spread = tiles.var(2) * (scale * choice.sharpness) ** 2 / 2
            logits += torch.matmul(spread.view(k.shape[0], -1, dim), k.square().transpose(1, 2)).view_as(logits)
        ends = (torch.arange(tokens // tile, device=q.device) + 1) * tile
        logits.masked_fill_(torch.arange(tokens, device=q.device) >= ends[:, None], -torch.inf)
        mass = torch.softmax(logits, -1).view(heads, tokens // tile, -1, choice.kv_block).sum(-1)
        return mass.view(heads, tokens // choice.q_block, -1, mass.shape[-1]).mean(2)
    queries = q.view(heads, tokens // choice.q_block, choice.q_block, dim).mean(2) * (scale * choice.sharpness)
    blocks = k.view(k.shape[0], -1, choice.kv_block, dim)
    largest, smallest, mean = blocks.amax(2), blocks.amin(2), blocks.mean(2)
    part = float(size or 1.0)
    largest, smallest = mean + part * (largest - mean), mean + part * (smallest - mean)
    grouped = queries.view(k.shape[0], -1, dim)
    logits = grouped.clamp(min=0) @ largest.transpose(1, 2) + grouped.clamp(max=0) @ smallest.transpose(1, 2)
    return logits.view(heads, -1, blocks.shape[1]).masked_fill(~visible, -torch.inf).softmax(-1)


def ranked(choice, q, k, v, p, scale):
    """Return V (H, R, C) so that a block is kept if V < the head's amount."""
    tokens = q.shape[1]
    visible, forced, count = grid_of(choice, tokens, q.device)
    mass = block_mass(choice, p) if choice.scorer == "mass" else estimated(choice, q, k, scale)
    if choice.values:
        size = v.view(v.shape[0], -1, choice.kv_block, v.shape[2]).mean(2).norm(dim=-1)
        mass = mass * size.repeat_interleave(mass.shape[0] // v.shape[0], 0)[:, None]
        mass = mass / mass.sum(-1, keepdim=True)
    if choice.group:
        heads, group = mass.shape[0], mass.shape[0] // k.shape[0]
        mass = mass.view(k.shape[0], group, *mass.shape[1:]).mean(1).repeat_interleave(group, 0)
        assert mass.shape[0] == heads
    if choice.rule == "even":
        return 1 / (mass * count[:, None]).clamp(min=1e-9)
    best, where = mass.masked_fill(forced | ~visible, -1.0).sort(dim=-1, descending=True)
    if choice.rule == "share":
        floor = 0 if choice.decode else tokens // choice.kv_block // 2
        before = torch.arange(mass.shape[-1], device=q.device) / count.clamp(min=floor)[:, None]
        before = before.expand_as(best)
    else:
        best = best.clamp(min=0)
        covered = mass.masked_fill(~forced, 0.0).sum(-1, keepdim=True)
        before = covered + best.cumsum(-1) - best
    return torch.empty_like(mass).scatter_(-1, where, before.contiguous())


def kept_blocks(choice, values, amounts, tokens):
    """Return (H, R, C) bool: the blocks that each head visits, for amounts (H,); nothing for a negative amount."""
    visible, forced, _ = grid_of(choice, tokens, values.device)
    amounts = amounts.to(values)[:, None, None]
    chosen = (values < amounts) | (amounts >= max(GRIDS[choice.rule])) | forced
    return chosen & visible & (amounts >= 0)


def attend(dense, blocks, choice):
    """Return the output (H, N, D) fp32 of dense attention masked to blocks, with what stands in for the others."""
    p, v = dense.p, dense.v
    heads, tokens, _ = p.shape
    tiles = p.view(heads, tokens // choice.q_block, choice.q_block, -1, choice.kv_block)
    masked = tiles if blocks is None else tiles * blocks[:, :, None, :, None].to(p.dtype)
    out = torch.matmul(masked.view(v.shape[0], -1, tokens), v).view(heads, tokens, -1).float()
    dim = v.shape[2] - PADDED
    if blocks is not None and choice.omitted:
        out = out + stand_ins(dense, blocks, choice, out[..., dim : dim + 1])
    return out[..., :dim] / out[..., dim : dim + 1].clamp(min=1e-30)


def grouped(weights, values):
    """Return (H, M, K) weights times (Hk, K, D) values, (H, M, D) fp32."""
    found = torch.matmul(weights.to(values.dtype).reshape(values.shape[0], -1, weights.shape[2]), values)
    return found.view(*weights.shape[:2], -1).float()


def stand_ins(dense, blocks, choice, mass):
    """Return what omitted blocks contribute beside the visible mass (H, N, 1) of each query: (H, N, D + PADDED)."""
    heads, tokens, dim = dense.q.shape
    rows = tokens // choice.q_block
    omitted = grid_of(choice, tokens, mass.device)[0] & ~blocks
    spread = lambda found: found.repeat_interleave(choice.q_block, 1)
    if choice.omitted == "means":
        mean = lambda x: x.float().view(x.shape[0], -1, choice.kv_block, x.shape[2]).mean(2)
        logits = grouped(dense.q.float(), mean(dense.k).transpose(1, 2).contiguous()) * dense.scale
        weights = (logits + math.log(choice.kv_block) - dense.lse[..., None]).exp() * spread(omitted)
        return grouped(weights, mean(dense.v))
    tokens_of = omitted.repeat_interleave(choice.kv_block, 2)
    if choice.omitted == "row":
        at = torch.arange(rows, device=mass.device) * choice.q_block + choice.q_block // 2
        found = grouped(dense.p[:, at] * tokens_of, dense.v)
        share = found[..., dim : dim + 1]
        return spread(found / (1 - share).clamp(min=1e-6)) * mass
    queries = dense.q.float().view(heads, rows, choice.q_block, dim).mean(2) * dense.scale
    logits = grouped(queries, dense.k.float().transpose(1, 2).contiguous())
    ends = (torch.arange(rows, device=mass.device) + 1) * choice.q_block
    logits.masked_fill_(torch.arange(tokens, device=mass.device) >= ends[:, None], -torch.inf)
    total = logits.logsumexp(-1, keepdim=True)
    found = grouped((logits - total).exp() * tokens_of, dense.v)
    if choice.omitted == "query":
        return spread(found) * (spread(total) - dense.lse[..., None]).exp()
    share = found[..., dim : dim + 1]
    return spread(found / (1 - share).clamp(min=1e-6)) * mass


def extra_pairs(choice, density):
    """Return the pairs that stand-ins cost, as a density."""
    if not choice.omitted:
        return 0.0
    return (1 - density) / choice.kv_block if choice.omitted == "means" else 1 / choice.q_block


def with_ones(v):
    """Append a column of ones, whose product is the visible mass, and zeros up to an aligned width."""
    more = torch.zeros(*v.shape[:2], PADDED, dtype=v.dtype, device=v.device)
    more[..., 0] = 1
    return torch.cat([v, more], -1)


def heads_first(query, key, value):
    return tuple(each[0].float().contiguous() for each in (query, key, value))


@torch.no_grad()
def losses_of(model, ids, plan):
    """Return the loss of every next token under a plan, and the density of every layer and head."""
    visited = []

    def run(module, query, key, value, attention_mask, **kwargs):
        q, k, v = heads_first(query, key, value)
        scale, tokens = q.shape[2] ** -0.5, q.shape[1]
        p = probabilities(q, k, scale)
        blocks = None
        for i, choice in enumerate(plan.choices):
            amounts = plan.amounts[i, module.layer_idx]
            kept = kept_blocks(choice, ranked(choice, q, k, v, p, scale), amounts, tokens)
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


def costs_of(model, ids, choices, seed=0):
    """Return per choice (loss, density), each (amounts, layers, heads), by one forward and one backward pass."""
    layers = model.config.num_hidden_layers
    found = {choice: [None] * layers for choice in choices}

    def run(module, query, key, value, attention_mask, **kwargs):
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
        out = out.transpose(1, 2)
        if not out.requires_grad:
            out.requires_grad_()
        saved = [each.detach() for each in (query, key, value)]
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
        dense = Dense(q, k, with_ones(v).to(half), p.to(half), scale)
        out = attend(dense, None, choices[0])
        for choice in choices:
            visible, _, count = grid_of(choice, tokens, q.device)
            values = ranked(choice, q, k, v, p, scale)
            rows = slice(len(count) // 2, None) if choice.decode else slice(None)
            loss, density = [], []
            for amount in GRIDS[choice.rule]:
                blocks = kept_blocks(choice, values, torch.full((q.shape[0],), amount), tokens)
                delta = attend(dense, blocks, choice) - out
                loss.append(((delta * grad).sum(-1).double() ** 2).sum(1) / (2 * tokens))
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


def curve(model, choices, costs, texts, dense, args, name):
    """Return the trials around the density at which the worst kind rises by the tolerance, from dense to sparse."""
    trials, at = {}, START[choices[0].decode]
    while 0 <= at < len(DENSITIES) and at not in trials:
        trials[at] = trial(model, choices, costs, texts, dense, DENSITIES[at], name)
        above = trials[at]["rise"] > args.tolerance
        if not above and trials[at]["density"] > 1.3 * trials[at]["target"]:
            break  # no fewer blocks can be had
        at += -1 if above else 1
    return [trials[at] for at in sorted(trials)]


def trial(model, choices, costs, texts, dense, density, name):
    """Return the rise on each kind of text at a density, with budgets from the others, or from all for `ALL_KINDS`."""
    kinds, visited = {}, {}
    for kind in texts:
        others = mean_costs(costs, [each for each in texts if each != kind or ALL_KINDS in name] or [kind])
        if ONE_BUDGET in name:
            amounts = uniform_amounts(choices[0], others, density)
        else:
            amounts = allocation(choices, others, density, model.config.num_key_value_heads)
        plan = Plan(choices, amounts.to(model.device))
        rises, seen = [], []
        for ids, before in zip(texts[kind], dense[kind], strict=True):
            losses, share = losses_of(model, ids, plan)
            rise = losses - before
            rises.append((rise[rise.shape[0] // 2 :] if choices[0].decode else rise).double().cpu())
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


MASS, MEAN = Choice(scorer="mass"), Choice()
TILE = {"q_block": 16, "kv_block": 16, "local": 112}
BOUNDS = {
    "true mass, share": (MASS,),
    "true mass, top-p": (replace(MASS, rule="top_p"),),
    "true mass, even": (replace(MASS, rule="even"),),
    "true mass, share, 32 local tokens": (replace(MASS, local=0),),
    "true mass, share, 16 x 16": (replace(MASS, **TILE),),
    "true mass, share, 32 x 16": (replace(MASS, kv_block=16),),
    "true mass, share, 64 x 64": (replace(MASS, q_block=64, kv_block=64),),
    "true mass, share, 128 x 128": (replace(MASS, q_block=128, kv_block=128),),
    "true mass, share, columns 32 x 1": (replace(MASS, kv_block=1),),
    "true mass, share, columns 32 x 4": (replace(MASS, kv_block=4),),
    "true mass, share, columns 16 x 4": (replace(MASS, q_block=16, kv_block=4),),
    "true mass by value, share": (replace(MASS, values=True),),
    "true mass, share or top-p by head": (MASS, replace(MASS, rule="top_p")),
}
SCORED = {
    "mean query, share": (MEAN,),
    "mean query, share, one budget": (MEAN,),
    "mean query, top-p": (replace(MEAN, rule="top_p"),),
    "mean query, even": (replace(MEAN, rule="even"),),
    "mean query, share, 64 local tokens": (replace(MEAN, local=32),),
    "mean query, share, 32 local tokens": (replace(MEAN, local=0),),
    "mean query, share, 128 or 32 local tokens by head": (MEAN, replace(MEAN, local=0)),
    "mean query, share, 16 x 16": (replace(MEAN, scorer="mean 16", **TILE),),
    "mean query, share, 16 x 16, 32 local tokens": (replace(MEAN, scorer="mean 16", **{**TILE, "local": 16}),),
    "mean query, share, 32 x 16": (replace(MEAN, kv_block=16),),
    "mean query, share, 64 x 64": (replace(MEAN, q_block=64, kv_block=64, scorer="mean 64"),),
    "mean queries of 8 tokens, share": (replace(MEAN, scorer="mean 8", sharpness=0.9),),
    "mean query, share, heads together": (replace(MEAN, group=True),),
    "bounds, share": (replace(MEAN, scorer="bound 0.5"),),
    "mean query or bounds by head, share": (MEAN, replace(MEAN, scorer="bound 0.5")),
    "mean query, share or top-p by head": (MEAN, replace(MEAN, rule="top_p")),
}
PAGE = Choice(q_block=1, kv_block=32, scorer="bound 1.0", sharpness=1.0, local=255, group=True, last=0, decode=True)
DECODE = {
    "bounds, share, one budget": (PAGE,),
    "bounds, share": (PAGE,),
    "bounds, top-p, one mass": (replace(PAGE, rule="top_p"),),
    "bounds, top-p": (replace(PAGE, rule="top_p"),),
    "bounds of half the range, top-p": (replace(PAGE, rule="top_p", scorer="bound 0.5"),),
    "bounds of half the range, share": (replace(PAGE, scorer="bound 0.5"),),
    "true mass, share": (replace(PAGE, scorer="mass"),),
    "true mass, top-p": (replace(PAGE, scorer="mass", rule="top_p"),),
    "bounds of half the range, top-p, 64 recent tokens": (replace(PAGE, rule="top_p", scorer="bound 0.5", local=64),),
    "bounds, top-p, pages of 16": (replace(PAGE, rule="top_p", scorer="bound 0.5", kv_block=16),),
    "bounds, top-p, pages of 64": (replace(PAGE, rule="top_p", scorer="bound 0.5", kv_block=64),),
}
TILES = {
    "true mass, columns 32 x 1": (replace(MASS, kv_block=1),),
    "true mass, columns 32 x 4": (replace(MASS, kv_block=4),),
    "true mass, columns 32 x 8": (replace(MASS, kv_block=8),),
    "true mass, columns 32 x 16": (replace(MASS, kv_block=16),),
    "true mass, columns 16 x 4": (replace(MASS, **{**TILE, "kv_block": 4}),),
    "true mass, columns 64 x 1": (replace(MASS, q_block=64, kv_block=1),),
    "true mass, 16 x 16": (replace(MASS, **TILE),),
    "mean query, 32 x 32": (MEAN,),
    "mean query, 32 x 32, all kinds": (MEAN,),
    "mean query, columns 32 x 1": (replace(MEAN, kv_block=1),),
    "mean query, columns 32 x 4": (replace(MEAN, kv_block=4),),
    "mean query, columns 32 x 8": (replace(MEAN, kv_block=8),),
    "mean query, columns 32 x 16": (replace(MEAN, kv_block=16),),
    "mean query, columns 32 x 16, all kinds": (replace(MEAN, kv_block=16),),
    "mean query, columns 64 x 16": (replace(MEAN, scorer="mean 64", q_block=64, kv_block=16),),
    "mean query, columns 16 x 4": (replace(MEAN, scorer="mean 16", **{**TILE, "kv_block": 4}),),
    "mean query, columns 64 x 1": (replace(MEAN, scorer="mean 64", q_block=64, kv_block=1),),
    "mean query, 16 x 16": (replace(MEAN, scorer="mean 16", **TILE),),
    "mean query, 16 x 16, all kinds": (replace(MEAN, scorer="mean 16", **TILE),),
    "mean query, 64 x 64": (replace(MEAN, q_block=64, kv_block=64, scorer="mean 64"),),
    "mean query, 64 x 32": (replace(MEAN, q_block=64, scorer="mean 64"),),
    "mean queries of 32 tokens, 64 x 32": (replace(MEAN, q_block=64),),
}
FORMS = {
    "mean query": (MEAN,),
    "mean query, one budget": (MEAN,),
    "mean query, last 32 queries": (replace(MEAN, last=32),),
    "mean query, last 0 queries": (replace(MEAN, last=0),),
    "mean query, 128 or 32 local tokens by head": (MEAN, replace(MEAN, local=0)),
    "mean queries of 8 tokens": (replace(MEAN, scorer="mean 8", sharpness=0.9),),
    "mean query and spread": (replace(MEAN, scorer="spread 32", sharpness=0.75),),
    "mean query, spread or bounds by head": (
        MEAN,
        replace(MEAN, scorer="spread 32"),
        replace(MEAN, scorer="bound 0.5"),
    ),
    "mean query by value": (replace(MEAN, values=True),),
    "mean query, mean keys and values stand in": (replace(MEAN, omitted="means"),),
    "mean query, what it reads stands in": (replace(MEAN, omitted="query"),),
    "mean query, what the middle query reads stands in": (replace(MEAN, omitted="row"),),
    "true mass, mean keys and values stand in": (replace(MASS, omitted="means"),),
    "mean query, first layer dense": (replace(MEAN, dense_layers=(0,)),),
    "mean query, first two layers dense": (replace(MEAN, dense_layers=(0, 1)),),
    "mean query, last layer dense": (replace(MEAN, dense_layers=(-1,)),),
    "mean query, first and last layer dense": (replace(MEAN, dense_layers=(0, -1)),),
}
STUDIES = {"tiles": TILES, "forms": FORMS, "bounds": BOUNDS, "scored": SCORED, "decode": DECODE}


def flat(rows):
    """Return the rows of a table."""
    for row in rows:
        near = min(row["trials"], key=lambda each: abs(each["target"] - SHOWN))
        found = [f"{near['rises'][kind][0]:+.1%}" for kind in near["rises"]] if near["target"] == SHOWN else []
        study, _, name = row["name"].partition(": ")
        yield {
            "study": study,
            "choice": name,
            "needed": "" if row["needed"] is None else f"{row['needed']:.1%}",
            "worst": max(row["trials"], key=lambda each: -abs(each["density"] - (row["needed"] or 0)))["worst"],
            **dict(zip(row["trials"][0]["rises"], found or [""] * len(row["trials"][0]["rises"]), strict=True)),
        }


def predicted(names, model, texts, amounts, baseline):
    """Yield the predicted loss of choices with one amount for all heads, and of the first choice at equal pairs.

    It takes one forward and one backward pass per text. The first choice is interpolated between its amounts, in the
    logarithm of the loss.
    """
    GRIDS["share"] = (*amounts, 1.0)
    for kind, each in texts.items():
        choices = list(dict.fromkeys(choice for several in names.values() for choice in several))
        costs = [costs_of(model, ids, choices, seed) for seed, ids in enumerate(each)]
        mean = mean_costs(dict(enumerate(costs)), list(range(len(costs))))
        curves = {
            name: list(zip(mean[choice][1].mean((1, 2)).tolist(), mean[choice][0].sum((1, 2)).tolist(), strict=True))[
                :-1
            ]
            for name, (choice, *_) in names.items()
        }
        for name, curve in curves.items():
            for (pairs, loss), amount in zip(curve, amounts, strict=True):
                base = at_equal_pairs(curves[baseline], pairs)
                yield {"kind": kind, "choice": name, "budget": amount, "pairs": f"{pairs:.1%}", "nats": loss,
                       "against": f"{loss / base - 1:+.0%}"}  # fmt: skip


def at_equal_pairs(curve, pairs):
    """Return the loss of a curve of (pairs, loss) at a number of pairs, log-linear, also beyond its ends."""
    for (a, x), (b, y) in pairwise(curve):
        if pairs <= b or (b, y) == curve[-1]:
            return x * (y / x) ** ((pairs - a) / (b - a))
    raise ValueError("a curve needs two points")


def stretches(tokenizer, text, tokens, count):
    ids = encode(tokenizer, text, count * tokens + 1)
    return [ids[:, i * tokens : (i + 1) * tokens + 1] for i in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cost-tokens", type=int, default=None, help="length of the texts for costs, default --tokens")
    parser.add_argument("--stretches", type=int, default=2, help="held-out stretches of each kind")
    parser.add_argument("--cost-stretches", type=int, default=1, help="stretches of each kind for costs")
    parser.add_argument("--study", action="append", choices=[*STUDIES], default=None)
    parser.add_argument("--only", default="", help="names of choices that contain one of these words, by ;")
    parser.add_argument("--texts", type=Path, default=None, help="folder of KIND.txt instead of the built-in texts")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--together", type=int, default=4, help="choices whose costs one pass measures")
    parser.add_argument("--order", type=Path, default=None, help="file with names of choices, the first ones first")
    parser.add_argument("--predict", default="", help="shares: only predict the loss at these, without any trial")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-show", action="store_true", help="print the table of --out, and measure nothing")
    args = parser.parse_args()
    if args.only_show:
        rows = json.loads(args.out.read_text("utf-8"))["rows"]
        print(json.dumps({"rows": list(flat(rows))}) if args.json else "\n".join(map(str, flat(rows))))
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.monotonic()
    model, tokenizer = load_model(args.model, device=args.device)
    kinds = args.kinds.split(",")
    text = lambda kind: (args.texts / f"{kind}.txt").read_text("utf-8") if args.texts else text_of(kind)
    parts = {kind: split_text(text(kind)) for kind in kinds}
    texts = {kind: stretches(tokenizer, parts[kind].held_out, args.tokens, args.stretches) for kind in kinds}
    tune_on = {
        kind: stretches(tokenizer, parts[kind].calibration, args.cost_tokens or args.tokens, args.cost_stretches)
        for kind in kinds
    }
    found = {name: each for study in args.study or STUDIES for name, each in
             ((f"{study}: {name}", choices) for name, choices in STUDIES[study].items())}  # fmt: skip
    if args.only:
        found = {name: each for name, each in found.items() if any(word in name for word in args.only.split(";"))}
    if args.order:
        first = [line for line in args.order.read_text().splitlines() if line in found]
        found = {name: found[name] for name in dict.fromkeys([*first, *found])}
    if args.predict:
        amounts = [float(each) for each in args.predict.split(",")]
        with evaluating(model), torch.no_grad():
            rows = [*predicted(found, model, tune_on, amounts, next(iter(found)))]
        print(json.dumps({"rows": rows}) if args.json else "\n".join(map(str, rows)))
        return
    rows = json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else []
    rows = [row for row in rows if "trials" in row]
    found = {name: each for name, each in found.items() if name not in {row["name"] for row in rows}}
    with evaluating(model), torch.no_grad():
        dense = {kind: [token_losses(model, ids)[0] for ids in each] for kind, each in texts.items()}
        plain = {kind: math.exp(float(torch.cat(each).mean())) for kind, each in dense.items()}
        print("dense perplexity", plain, "after", round(time.monotonic() - started, 1), "s", flush=True)
        costs: dict = {kind: {} for kind in kinds}
        names = list(found)
        for at in range(0, len(names), args.together):
            if time.monotonic() - started > args.seconds:
                break
            some = {name: found[name] for name in names[at : at + args.together]}
            try:
                missing = {measured(c): None for each in some.values() for c in each}
                missing = {c: None for c in missing if c not in costs[kinds[0]]}
                for kind in kinds if missing else ():
                    each = [costs_of(model, ids, list(missing), seed) for seed, ids in enumerate(tune_on[kind])]
                    costs[kind] |= mean_costs(dict(enumerate(each)), list(range(len(each))))
            except (RuntimeError, ValueError) as error:
                print(list(some), "FAILED", str(error)[:300], flush=True)
                continue
            print("costs after", round(time.monotonic() - started, 1), "s", flush=True)
            for name, choices in some.items():
                if time.monotonic() - started > args.seconds:
                    break
                try:
                    trials = curve(model, choices, costs, texts, dense, args, name)
                except (RuntimeError, ValueError) as error:
                    print(name, "FAILED", str(error)[:300], flush=True)
                    continue
                rows.append({"name": name, "needed": needed(trials, args.tolerance), "trials": trials})
                print(f"{name}: {rows[-1]['needed']} after {time.monotonic() - started:.1f} s", flush=True)
                if args.out:
                    args.out.write_text(json.dumps({"tokens": args.tokens, "dense": plain, "rows": rows}))
    if args.json:
        print(json.dumps({"tokens": args.tokens, "dense": plain, "rows": rows}))


if __name__ == "__main__":
    main()
