# SPDX-License-Identifier: Apache-2.0
"""Find layers that can read the blocks of earlier layers, and the budgets of the heads that choose.

    estimated masses --> the most alike heads of each earlier layer --> costs of reading their lists, at each budget
                     --> dynamic programming: the layers that choose
                     --> in turns: one budget for all heads that read one list, and the best list for each head

Shapes: L layers that see their whole context, H q heads, M lists that a head may read, R x C blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.costs import BUDGETS, Budgets
from dynaxx.lab.tune.sensitivity import fisher_gradient, hidden_states, probing, reading
from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.ops import sparse_attention
from dynaxx.policy import SharedChoice
from dynaxx.selection import Hybrid, Scorer, select_blocks

REACH = 4  # most layers between a layer and the one whose blocks it reads
LISTS = 3  # heads of a layer whose lists are measured for each head
ROUNDS = 8  # turns of budgets and lists
WORTH = 1.08  # more blocks than without sharing that the saved time of choosing pays for


class SharedCosts(NamedTuple):
    """The costs of reading another layer's blocks. Lag 0 is a layer's own choice."""

    layers: tuple[int, ...]
    matches: Tensor  # (lags, L, H, M) int64, heads of the layer that many places earlier, the most alike first
    loss: Tensor  # (lags, budgets, L, H, M) fp64, nats per token; infinite where there is no such layer
    density: Tensor  # (budgets, L, H) fp64, of a layer's own choice

    @classmethod
    def mean(cls, costs: Sequence[SharedCosts]) -> SharedCosts:
        """Return the mean cost and density over several texts with the same matches."""
        first = costs[0]
        mean = lambda name: torch.stack([getattr(each, name) for each in costs]).mean(0)
        return cls(first.layers, first.matches, mean("loss"), mean("density"))


@torch.no_grad()
def likeness(model: Any, ids: Tensor, scorer: Scorer, forced: Hybrid, block_size: int | tuple[int, int]) -> Tensor:
    """Return how alike the estimated masses of any two heads are, (L, H, L, H), at most 1.

    It is the Bhattacharyya coefficient over the blocks that `forced` does not always show.
    """
    found: list[Tensor] = []
    rows = 0

    def see(layer: int, q: Tensor, k: Tensor, scale: float) -> None:
        nonlocal rows
        grid = BlockGrid(q.shape[1], k.shape[1], as_block_size(block_size), True)
        open_blocks = _open_blocks(forced, grid).to(q.device)
        scores = scorer.prepare(q, k, grid, scale)(0, grid.q_blocks)[0].float()
        mass = scores.masked_fill(~open_blocks, -torch.inf).softmax(-1).nan_to_num(0.0)
        found.append(mass.sqrt().flatten(1))
        rows = int(open_blocks.any(-1).sum())

    with reading(model, see):
        model.base_model(ids[:, :-1].to(model.device), use_cache=False)
    flat = torch.cat(found)
    return (flat @ flat.T / max(1, rows)).view(len(found), -1, len(found), flat.shape[0] // len(found)).cpu()


def _open_blocks(forced: Hybrid, grid: BlockGrid) -> Tensor:
    """Return which visible blocks a rule's pattern does not show, (R, C) bool."""
    every = BlockLayout.from_block_indices(
        torch.arange(grid.kv_blocks, device="cpu").expand(1, 1, grid.q_blocks, -1), grid.seqlen_q, grid.seqlen_k,
        block_size=grid.block_size,
    )  # fmt: skip
    shown = forced.pattern.layout(grid.seqlen_q, grid.seqlen_k, causal=True, block_size=grid.block_size)
    table = torch.zeros(2, grid.q_blocks, grid.kv_blocks, dtype=torch.bool, device="cpu")
    for index, layout in enumerate((every, shown)):
        flat_rows, cols, _ = layout.entries()
        table[index, flat_rows, cols] = True
    return table[0] & ~table[1]


def matched(alike: Tensor, reach: int, lists: int = LISTS) -> Tensor:
    """Return the most alike heads of the layers up to `reach` places earlier, (1 + reach, L, H, M); lag 0 is itself."""
    layers, heads = alike.shape[:2]
    lists = min(lists, heads)
    found = torch.arange(heads, device="cpu")[:, None].expand(1 + reach, layers, heads, lists).clone()
    for lag in range(1, 1 + reach):
        for layer in range(lag, layers):
            found[lag, layer] = alike[layer, :, layer - lag].topk(lists, dim=-1).indices
    return found


def shared_costs(
    model: Any,
    ids: Tensor,
    rule: Callable[[float], Hybrid],
    matches: Tensor,
    *,
    block_size: int | tuple[int, int],
    seed: int = 0,
    done: Callable[[int], None] = lambda layer: None,
) -> SharedCosts:
    """Measure what heads lose that read the blocks of matched heads of earlier layers, at each budget of `BUDGETS`.

    Args:
        model: a causal language model of transformers, in eval mode.
        ids: (1, N) one text.
        rule: the rule of a budget.
        matches: see `SharedCosts.matches`.
        block_size: tokens per block, or (q_block, kv_block).
        seed: seed for the sampled tokens of the gradient.
        done: a function that is called with the index of each finished layer.
    """
    layouts: dict[int, list[BlockLayout]] = {}
    most: dict[int, list[int | None]] = {}  # slots for the lists of any heads, on a GPU
    lags, layers, heads, lists = matches.shape
    loss = torch.full((lags, len(BUDGETS), layers, heads, lists), torch.inf, dtype=torch.float64, device="cpu")
    density = torch.zeros(len(BUDGETS), layers, heads, dtype=torch.float64, device="cpu")
    loss[:, -1] = 0.0  # a budget of everything

    def see(layer: int, q: Tensor, k: Tensor, scale: float) -> None:
        each = [select_blocks(q, k, rule(budget), block_size=block_size, scale=scale) for budget in BUDGETS[:-1]]
        place, layouts[layer] = len(layouts), each
        counts = torch.stack([x.kv_num_blocks.sum((0, 2)) for x in each]).cpu()  # (budgets, H)
        density[:-1, place] = counts.double() / max(1, each[0].grid().visible_blocks())
        density[-1, place] = 1.0
        most[layer] = [heads * int(count) if q.is_cuda else None for count in counts.amax(1)]

    def visit(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, scale: float) -> None:
        order = sorted(layouts)
        place = order.index(layer)

        def cost(layout: BlockLayout) -> Tensor:
            delta = sparse_attention(q, k, v, layout, scale=scale) - out
            return ((delta * grad).sum(-1).double() ** 2).sum((0, 1)) / (2 * out.shape[1])

        loss[0, :-1, place] = torch.stack([cost(layout) for layout in layouts[layer]]).cpu()[..., None]
        for lag in range(1, min(lags, 1 + place)):
            given = list(zip(layouts[order[place - lag]], most[order[place - lag]], strict=True))
            for index in range(lists):
                named = tuple(matches[lag, place, :, index].tolist())
                found = [cost(layout.take_heads(named, capacity)) for layout, capacity in given]
                loss[lag, :-1, place, :, index] = torch.stack(found).cpu()
        done(layer)

    with torch.no_grad(), reading(model, see):
        model.base_model(ids[:, :-1].to(model.device), use_cache=False)
    with probing(model, visit):
        hidden = hidden_states(model, ids[:, :-1])
        hidden.backward(fisher_gradient(model, hidden.detach(), seed))
    return SharedCosts(tuple(sorted(layouts)), matches, loss, density)


def layer_costs(costs: Sequence[tuple[Tensor, Tensor]], density: float) -> Tensor:
    """Return the cost of each layer by lag, (lags, L), at the price of blocks that gives a density without lag.

    Args:
        costs: per lag (loss, density), each (budgets, L, H).
        density: the mean density without lag.
    """
    best = lambda loss, visited, price: (loss + price * visited).min(0)
    low, high = 1e-12, 1e3
    for _ in range(100):
        price = (low * high) ** 0.5
        index = best(*costs[0], price).indices
        low, high = (price, high) if float(costs[0][1].gather(0, index[None]).mean()) > density else (low, price)
    return torch.stack([best(*each, high).values.sum(-1) for each in costs])


def choosing_layers(table: Tensor, count: int) -> list[int]:
    """Return `count` layers that choose, with the smallest total cost.

    Args:
        table: (lags, L) cost of a layer that reads the layer that many places before it.
        count: number of layers that choose; the first layer always does.

    Raises:
        ValueError: so few layers cannot serve all others within reach.
    """
    lags, layers = table.shape
    reach = torch.full(
        (layers, layers + 1), torch.inf, dtype=torch.float32, device="cpu"
    )  # [a, b]: layers a .. b - 1 with the blocks of a
    for a in range(layers):
        total = 0.0
        for b in range(a, min(layers, a + lags)):
            total += float(table[b - a, b])
            reach[a, b + 1] = total
    best = torch.full((count + 1, layers + 1), torch.inf, dtype=torch.float32, device="cpu")
    best[0, 0] = 0
    before = {}
    for used in range(1, count + 1):
        for b in range(1, layers + 1):
            options = best[used - 1, :b] + reach[:b, b]
            best[used, b], before[used, b] = options.min(0).values, int(options.argmin())
    if best[count, layers].isinf():
        raise ValueError(f"{count} layers cannot serve {layers} within a reach of {lags - 1}")
    found, end = [], layers
    for used in range(count, 0, -1):
        end = before[used, end]
        found.append(end)
    return found[::-1]


def sources_of(choosing: Sequence[int], layers: int) -> list[int]:
    """Return the choosing layer whose blocks each layer reads."""
    return [max(each for each in choosing if each <= layer) for layer in range(layers)]


class SharedLists:
    """Layers that choose, lists that all other heads read, and budgets for any density: one for each list.

    Args:
        costs: the costs of reading other layers' blocks.
        sources: for each layer, the place of the layer whose blocks it reads.
        density: the density at which each head gets the best list.
    """

    def __init__(self, costs: SharedCosts, sources: Sequence[int], density: float) -> None:
        self.costs, self.sources = costs, list(sources)
        lags = [layer - source for layer, source in enumerate(self.sources)]
        each = range(len(lags))
        self._matches = torch.stack([costs.matches[lags[i], i] for i in each])  # (L, H, M)
        self._loss = torch.stack([costs.loss[lags[i], :, i] for i in each], 1)  # (budgets, L, H, M)
        of_source = costs.density[:, self.sources]  # (budgets, L, H)
        self._density = torch.stack([of_source[:, i][:, self._matches[i]] for i in each], 1)  # (budgets, L, H, M)
        alone = Allocator(costs.density.flatten(1), costs.loss[0, ..., 0].flatten(1)).at(density)
        pick = self._best_lists(alone.choice, alone.price)
        best: tuple[float, Tensor] | None = None
        for _ in range(ROUNDS):
            self._read(pick)
            loss = self.at(density)[2]
            if best is not None and loss >= best[0]:
                break
            best = loss, pick
            found = self._allocator.at(density / self._share)
            pick = self._best_lists(found.choice[self._index], found.price)
        assert best is not None, "there is at least one round"
        self._read(best[1])

    def _read(self, pick: Tensor) -> None:
        """Let each head read one of its lists, and prepare the allocation of budgets to lists."""
        heads = pick.shape[1]
        take = lambda each: each.gather(-1, pick.expand(*each.shape[:-1])[..., None])[..., 0]
        self._match = take(self._matches)  # (L, H)
        owner = (torch.tensor(self.sources, dtype=torch.int64, device="cpu")[:, None] * heads + self._match).flatten()
        owners, self._index = owner.unique(return_inverse=True)
        add = lambda each: each.new_zeros(len(BUDGETS), len(owners)).index_add_(1, self._index, each.flatten(1))
        self._allocator = Allocator(add(take(self._density)), add(take(self._loss)))
        self._share = len(owners) / owner.numel()  # lists per head

    def _best_lists(self, budgets: Tensor, price: float) -> Tensor:
        """Return the list that loses each head least at given budgets (L * H), at the price of its blocks."""
        of_source = budgets.view(self._matches.shape[:2])[self.sources]  # (L, H), of the heads of each layer's source
        of_list = of_source[:, None].expand(*self._matches.shape[:2], -1).gather(2, self._matches)[None]  # (1, L, H, M)
        cost: Tensor = self._loss.gather(0, of_list)[0] + price * self._density.gather(0, of_list)[0]
        return cost.argmin(-1)

    @property
    def least_density(self) -> float:
        """The mean density when every head has the smallest budget."""
        return self._allocator.least_density * self._share

    @property
    def choosing(self) -> tuple[int, ...]:
        """Return the layers that choose."""
        return tuple(self.costs.layers[place] for place in sorted(set(self.sources)))

    def at(self, density: float) -> tuple[float, Budgets, float]:
        """Return the density, the budgets of each layer's heads, and the predicted loss, at most at this density."""
        found = self._allocator.at(density / self._share)
        rows = torch.tensor(BUDGETS, dtype=torch.float64, device="cpu")[found.choice][self._index].view(
            self._match.shape
        )
        return found.density * self._share, rows.tolist(), found.loss

    def budgets(self, density: float) -> tuple[float, Budgets]:
        """Return the density and the budgets of each layer's heads, at most at this density."""
        return self.at(density)[:2]

    def shared(self) -> tuple[SharedChoice, ...]:
        """Return the field `shared` of the policy."""
        layers = self.costs.layers
        return tuple(
            SharedChoice(layer=layers[place], source=layers[source], heads=tuple(self._match[place].tolist()))
            for place, source in enumerate(self.sources)
            if source != place
        )


def shared_lists(costs: SharedCosts, count: int, density: float) -> SharedLists:
    """Return the best `count` layers that choose, found by dynamic programming over costs at a density.

    Raises:
        ValueError: so few layers cannot serve all others within reach.
    """
    table = layer_costs([(loss.amin(-1), costs.density) for loss in costs.loss], density)
    for lag in range(1, len(table)):
        table[lag, :lag] = torch.inf
    return SharedLists(costs, sources_of(choosing_layers(table, count), len(costs.layers)), density)
