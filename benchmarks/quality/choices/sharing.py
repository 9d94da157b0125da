# SPDX-License-Identifier: Apache-2.0
"""Layers that take the scores of an earlier layer: which layers choose comes from dynamic programming.

    python -m benchmarks.quality.choices.sharing smollm2 --device cuda --stretches 1 --out sharing.json

A head of a layer that does not choose takes the scores of the head of the choosing layer whose scores are the most
alike (Bhattacharyya coefficient over blocks that are not always visible), with a budget of its own. Costs are measured
for every layer and every earlier layer within `--reach`. Dynamic programming then finds the K layers that choose with
the smallest cost, where a layer takes the scores of the last one before it. Which heads are alike and which layers
choose comes from the calibration halves of all kinds of text; budgets come from the other four kinds.

With `--lists`, heads take whole lists of blocks: a head has the budget of the head whose list it takes.
"""

from dataclasses import replace

import torch
from benchmarks.quality.choices.masked import heads_first
from benchmarks.quality.choices.setting import Setting, common_arguments, stored_rows
from benchmarks.quality.choices.trials import NAME, START, Plan, allocation, costs_of, curve, mean_costs, needed, tried
from benchmarks.quality.choices.ways import GRIDS, MEAN, TILE, OwnMasses, estimated, grid_of

from dynaxx.lab.attention_route import evaluating, routed
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.sharing import choosing_layers, layer_costs, sources_of

SMALL = replace(MEAN, scorer="mean 16", **TILE)
SHAPES = {"16 x 16": SMALL, "32 x 32": MEAN, "16 x 4": replace(SMALL, kv_block=4)}
AT = 0.25  # density at which the costs of sharing are compared


class SharedMasses(OwnMasses):
    """Masses of an earlier layer's blocks, by matched heads.

    Args:
        matches: (layers, layers, H), the head of an earlier layer (second index) for each head of a layer.
        sources: the layer whose scores each layer takes, or None to go back by the choice's lag.
    """

    def __init__(self, matches, sources=None):
        self._matches, self._sources, self._masses = matches, sources, {}

    def read(self, layer, choices, q, k, scale):
        self._masses[layer] = estimated(choices[0], q, k, scale)

    def of(self, layer, choice, q, k, p, scale):
        source = max(0, layer - choice.lag) if self._sources is None else self._sources[layer]
        return self._masses[source][self._matches[layer, source]]


@torch.no_grad()
def likeness(model, ids, choice):
    """Return how alike the scores of any two heads are, (layers, H, layers, H), at most 1."""
    found = []

    def run(module, query, key, value, attention_mask, **kwargs):
        q, k, _ = heads_first(query, key, value)
        visible, forced, _ = grid_of(choice, q.shape[1], q.device)
        mass = estimated(choice, q, k, q.shape[2] ** -0.5) * (visible & ~forced)
        found.append((mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)).sqrt().flatten(1))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None

    with routed(model, NAME, run):
        model.base_model(ids[:, :-1].to(model.device), use_cache=False)
    flat = torch.cat(found)
    counted = (visible_rows := grid_of(choice, ids.shape[1] - 1, flat.device))[0] & ~visible_rows[1]
    alike = flat @ flat.T / max(1, int(counted.any(1).sum()))
    return alike.view(len(found), -1, len(found), alike.shape[0] // len(found))


def matched(alike):
    """Return the most alike head of an earlier layer, (layers, layers, H); a layer's own heads match themselves."""
    best = alike.argmax(3).permute(0, 2, 1).clone()
    for layer in range(best.shape[0]):
        best[layer, layer] = torch.arange(best.shape[2])
    return best


def measured_rows(setting, shape, args, done):
    """Yield a row for each number of choosing layers."""
    choice, model = SHAPES[shape], setting.model
    layers = model.config.num_hidden_layers
    alike = [likeness(model, ids[0], choice) for ids in setting.tune_on.values()]
    matches = matched(torch.stack(alike).mean(0)).cpu()
    setting.say(f"{shape}: alike heads")
    lagged = [replace(choice, lag=lag) for lag in range(args.reach + 1)]
    masses = SharedMasses(matches)
    costs = {kind: costs_of(model, setting.tune_on[kind][0], lagged, masses=masses) for kind in setting.kinds}
    setting.say(f"{shape}: costs")
    together = mean_costs(costs, setting.kinds)
    table = layer_costs([together[each] for each in lagged], AT)
    for lag in range(1, len(table)):
        table[lag, :lag] = torch.inf
    plans = {f"{count} of {layers} layers choose": choosing_layers(table, count) for count in args.choosing}
    for step in args.steps:
        plans[f"every {step} layers"] = list(range(0, layers, step))
    if args.lists:
        plans |= {f"{name}, whole lists": each for name, each in plans.items()}
    for name, choosing in plans.items():
        lists, name = "lists" in name, f"sharing: {shape}, {name}"
        if name in done or setting.late():
            continue
        sources = sources_of(choosing, layers)
        if max(layer - source for layer, source in enumerate(sources)) > args.reach:
            raise ValueError(f"`--reach` must be at least the distance of choosing layers, got {args.reach}")
        one = lambda density, some=(sources, lists): shared_trial(setting, choice, matches, costs, *some, density)
        trials = curve(one, args.tolerance, START[False])
        row = {"name": name, "needed": needed(trials, args.tolerance), "trials": trials}
        yield {**row, "choosing": choosing, "cost": float(sum(table[i - s, i] for i, s in enumerate(sources)))}


def shared_trial(setting, choice, matches, costs, sources, lists, density):
    """Return the trial of a density where each layer takes the scores of its source, or its lists of blocks."""

    def plan_for(kind):
        others = mean_costs(costs, [each for each in setting.kinds if each != kind] or [kind])
        pick = lambda part: torch.stack(
            [others[replace(choice, lag=layer - source)][part][:, layer] for layer, source in enumerate(sources)], 1
        )
        found = (pick(0), pick(1))
        if lists:
            amounts = list_amounts(choice, found, matches, sources, density)
        else:
            amounts = allocation((choice,), {choice: found}, density, setting.model.config.num_key_value_heads)
        return Plan((choice,), amounts.to(setting.model.device), SharedMasses(matches, sources))

    return tried(setting, plan_for, density)


def list_amounts(choice, costs, matches, sources, density):
    """Return amounts (1, layers, heads), equal for all heads that take the list of the same head."""
    loss, visited = costs  # (amounts, layers, heads)
    layers, heads = loss.shape[1:]
    owner = torch.stack([sources[layer] * heads + matches[layer, sources[layer]] for layer in range(layers)]).flatten()
    owners, index = owner.unique(return_inverse=True)
    add = lambda each: each.new_zeros(each.shape[0], len(owners)).index_add_(1, index, each.flatten(1))
    found = Allocator(add(visited), add(loss)).at(density * layers * heads / len(owners))
    return torch.tensor(GRIDS[choice.rule])[found.choice][index].view(1, layers, heads)


def main():
    parser = common_arguments("python -m benchmarks.quality.choices.sharing", __doc__)
    parser.add_argument("--shape", action="append", choices=[*SHAPES], default=None)
    parser.add_argument("--reach", type=int, default=5, help="most layers back")
    parser.add_argument("--choosing", type=int, nargs="*", default=[15, 10], help="numbers of layers that choose")
    parser.add_argument("--steps", type=int, nargs="*", default=[2], help="distances of layers that choose regularly")
    parser.add_argument("--lists", action="store_true", help="measure each plan with whole lists, too")
    args = parser.parse_args()
    setting, rows = Setting.of(args), stored_rows(args.out)
    with evaluating(setting.model), torch.no_grad():
        setting.measure_dense()
        for shape in args.shape or SHAPES:
            for row in measured_rows(setting, shape, args, {row["name"] for row in rows}):
                rows.append(row)
                setting.store(rows)


if __name__ == "__main__":
    main()
