# SPDX-License-Identifier: Apache-2.0
"""Measure the loss of each kv head at each share of a cache's pages, and distribute shares among heads.

A decoding step of a dense model is one row of its prefill. The last rows of a text are therefore taken as steps: their
pages are chosen as a `PageBudget` chooses them, and the cost of a share follows from the gradient as in `sensitivity`.

Shapes: S steps, N tokens, P pages, H / G q and kv heads, D / E head_dim of q, k and of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.texts import float64
from dynaxx.lab.tune.costs import Allocator
from dynaxx.lab.tune.sensitivity import HeadCosts, fisher_gradient, hidden_states, probing
from dynaxx.selection.pages import PageBudget

# Shares that kv heads choose from, in addition to the first page and the window.
SHARES = (0.0, 0.01, 0.02, 0.04, 0.0625, 0.09, 0.125, 0.18, 0.25, 0.35, 0.5, 1.0)


def measure_page_costs(
    model: Any,
    ids: Tensor,
    budget: PageBudget,
    *,
    page_size: int,
    steps: int,
    layers: Sequence[int],
    seed: int = 0,
) -> list[HeadCosts]:
    """Measure every share on every kv head of some layers, for the last `steps` tokens of a text.

    Args:
        model: a causal language model of transformers, in eval mode.
        ids: (1, N) one text.
        budget: sinks, window and bound of the rule; its budget is ignored.
        page_size: tokens per page.
        steps: number of decoded tokens.
        layers: layers that may decode by a budget.
        seed: seed for the sampled tokens of the gradient.

    Returns:
        The costs by layer, in ascending order. `loss` is (shares, G) in nats per decoded token.
    """
    found: list[HeadCosts] = []

    def visit(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, scale: float) -> None:
        if layer not in layers:
            return
        kv_heads = k.shape[2]
        group = q.shape[2] // kv_heads
        queries = q[0, -steps:].float().unflatten(1, (kv_heads, group)).movedim(0, 2)  # (G, H / G, S, D)
        slopes = grad[0, -steps:].float().unflatten(1, (kv_heads, group)).movedim(0, 2)  # (G, H / G, S, E)
        keys, values = (x[0].float().transpose(0, 1)[:, None] for x in (k, v))  # (G, 1, N, D), (G, 1, N, E)
        position = torch.arange(k.shape[1], device=q.device)
        stands = position[-steps:, None]
        logits = (queries * scale) @ keys.transpose(-1, -2)
        mass = logits.masked_fill_(position > stands, -torch.inf).softmax(-1)  # (G, H / G, S, N)
        dense = mass @ values
        rank, forced, pages = _ranked(queries * scale, keys[:, 0], stands[:, 0], budget, page_size)
        loss = []
        for share in SHARES:
            kept = forced | (rank < (share * pages).ceil()[:, None])  # (G, S, P)
            seen = mass * kept.repeat_interleave(page_size, -1)[:, None, :, : k.shape[1]]
            sparse = (seen @ values) / seen.sum(-1, keepdim=True).clamp(min=torch.finfo(seen.dtype).tiny)
            cost = ((sparse - dense) * slopes).sum(-1).double() ** 2
            loss.append(cost.sum((1, 2)) / (2 * steps))
        found.append(HeadCosts(layer, torch.stack(loss).cpu()))

    with probing(model, visit):
        hidden = hidden_states(model, ids[:, :-1])
        hidden.backward(fisher_gradient(model, hidden.detach(), seed))
    return sorted(found, key=lambda costs: costs.layer)


def shares_of(losses: Sequence[Sequence[Tensor]], share: float) -> list[list[float]]:
    """Return a share of the pages for each layer and kv head, of mean `share`, with the smallest predicted loss.

    Args:
        losses: (shares, kv heads) of each layer, for one or more texts, whose mean counts.
        share: the mean share.
    """
    loss, shares = torch.stack([torch.cat(list(text), dim=1) for text in losses]).mean(0), float64(SHARES)
    choice = Allocator(shares[:, None].expand_as(loss), loss).at(share).choice
    found: list[list[float]] = shares[choice].view(len(losses[0]), -1).tolist()
    return found


def _ranked(
    queries: Tensor, keys: Tensor, stands: Tensor, budget: PageBudget, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank the pages of every step as `kernels.decode.reference.select_pages` does.

    Args:
        queries: (G, H / G, S, D), times the scale.
        keys: (G, N, D).
        stands: (S,) position of each step's token.
        budget: sinks, window and bound.
        page_size: tokens per page.

    Returns:
        (rank among the pages that are not forced (G, S, P), forced pages (S, P), number of pages (S,)).
    """
    tokens = keys.shape[1]
    count = -(-tokens // page_size)
    starts = torch.arange(count, device=keys.device) * page_size
    padded = lambda fill: torch.nn.functional.pad(keys, (0, 0, 0, count * page_size - tokens), value=fill)
    low, high = (padded(fill).unflatten(1, (count, page_size)) for fill in (torch.inf, -torch.inf))
    low, high = low.amin(2), high.amax(2)  # (G, P, D)
    if budget.bound < 1:
        used = (starts + page_size).clamp(max=tokens) - starts
        mean = padded(0.0).unflatten(1, (count, page_size)).sum(2) / used[:, None]
        low, high = (mean + budget.bound * (extreme - mean) for extreme in (low, high))
    up, down = queries.clamp(min=0).sum(1), queries.clamp(max=0).sum(1)  # (G, S, D)
    scores = up @ high.transpose(-1, -2) + down @ low.transpose(-1, -2)
    exists = starts <= stands[:, None]
    sink = starts < budget.sinks
    forced = exists & (sink | (starts + page_size > stands[:, None] + 1 - budget.window))
    scores = scores.masked_fill(~(exists & ~forced), -torch.inf)
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return rank.masked_fill(~exists | forced, count), forced, exists.sum(-1)
