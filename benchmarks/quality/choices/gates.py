# SPDX-License-Identifier: Apache-2.0
"""Distil gates: a matrix per head that turns mean queries into ones that choose blocks as true attention does.

    python -m benchmarks.quality.choices.gates smollm2 --device cuda --stretches 1 --cost-stretches 6 --out gates.json

The model's weights stay as they are. A gate starts as the identity, which is the plain mean query, and learns to give
each block that is not always visible its share of the true attention of the row (cross entropy). For each kind of text,
gates and budgets are learned on the other four kinds. A gate adds one small product per row to the choice.
"""

from dataclasses import replace

import torch
from benchmarks.quality.choices.masked import heads_first, probabilities
from benchmarks.quality.choices.setting import Setting, common_arguments, stored_rows
from benchmarks.quality.choices.trials import NAME, START, Plan, allocation, costs_of, curve, mean_costs, needed, tried
from benchmarks.quality.choices.ways import (
    MEAN,
    TILE,
    OwnMasses,
    block_mass,
    estimated,
    grid_of,
    mean_queries,
)

from dynaxx.lab.attention_route import evaluating, routed

CHOICES = {
    "distilled gate, 32 x 32": MEAN,
    "distilled gate, 16 x 16": replace(MEAN, scorer="mean 16", **TILE),
    "distilled gate, 64 x 32": replace(MEAN, q_block=64, scorer="mean 64"),
}


class GatedMasses(OwnMasses):
    """Masses from mean queries times the matrices of a layer's heads."""

    def __init__(self, gates):
        self._gates = gates  # (layers, H, D, D)

    def of(self, layer, choice, q, k, p, scale):
        return estimated(choice, q, k, scale, self._gates[layer])


@torch.no_grad()
def examples(model, ids, choice):
    """Return per layer the mean queries (H, R, D), the keys (Hk, N, D) and the true mass of every block (H, R, C)."""
    found = []

    def run(module, query, key, value, attention_mask, **kwargs):
        q, k, v = heads_first(query, key, value)
        scale = q.shape[2] ** -0.5
        p = probabilities(q, k, scale)
        found.append((mean_queries(choice, choice.scorer, q, scale)[1], k, block_mass(choice, p)))
        out = torch.matmul(p.view(k.shape[0], -1, k.shape[1]), v).view(q.shape)
        return out.transpose(0, 1)[None].to(query.dtype), None

    with routed(model, NAME, run):
        model.base_model(ids[:, :-1].to(model.device), use_cache=False)
    return [torch.stack(each) for each in zip(*found, strict=True)]


def entropy(gates, example, choice, ends, free):
    """Return the cross entropy of blocks that are not always visible, weighted by their mass, per layer and head."""
    queries, keys, mass = example
    layers, heads, rows, dim = queries.shape
    logits = torch.matmul((queries @ gates).view(layers, keys.shape[1], -1, dim), keys.transpose(2, 3))
    logits = logits.view(layers, heads, rows, -1)
    logits = logits.masked_fill(torch.arange(logits.shape[3], device=ends.device) >= ends[:, None], -1e30)
    blocks = logits.unflatten(3, (-1, choice.kv_block)).logsumexp(4).masked_fill(~free, -1e30)
    return -(mass * free * blocks.log_softmax(-1)).sum((2, 3)) / rows


@torch.enable_grad()
def distilled(found, choice, tokens, steps, rate):
    """Return gates (layers, H, D, D) that were learned on examples, and the first and last mean cross entropy."""
    layers, heads, _, dim = found[0][0].shape
    device = found[0][0].device
    visible, forced, count = grid_of(choice, tokens, device)
    free = visible & ~forced
    ends = (torch.arange(len(count), device=device) + 1) * choice.q_block
    gates = torch.eye(dim, device=device).expand(layers, heads, dim, dim).clone().requires_grad_()
    optimizer = torch.optim.Adam([gates], lr=rate)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        loss = entropy(gates, found[step % len(found)], choice, ends, free)
        losses.append(float(loss.detach().mean()))
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    some = min(len(found), steps)
    return gates.detach(), sum(losses[:some]) / some, sum(losses[-some:]) / some


def row_of(setting, choice, name, args):
    """Return the row of one choice with distilled gates."""
    found = {kind: [examples(setting.model, ids, choice) for ids in setting.tune_on[kind]] for kind in setting.kinds}
    setting.say(f"{name}: examples")
    masses, costs = {}, {}
    for left in setting.kinds:
        others = [kind for kind in setting.kinds if kind != left] or [left]
        mixed = [each for several in zip(*(found[kind] for kind in others), strict=True) for each in several]
        gates, before, after = distilled(mixed, choice, args.tokens, args.steps, args.rate)
        masses[left] = GatedMasses(gates)
        setting.say(f"{name}: gates without {left}, cross entropy {before:.4f} -> {after:.4f}")
        costs[left] = {kind: costs_of(setting.model, setting.tune_on[kind][0], [choice], masses=masses[left])
                       for kind in others}  # fmt: skip
    kv_heads = setting.model.config.num_key_value_heads

    def one(density):
        plan = lambda kind: Plan((choice,), amounts_of(kind).to(setting.model.device), masses[kind])
        amounts_of = lambda kind: allocation((choice,), mean_costs(costs[kind], [*costs[kind]]), density, kv_heads)
        return tried(setting, plan, density)

    trials = curve(one, args.tolerance, START[False])
    return {"name": f"gates: {name}", "needed": needed(trials, args.tolerance), "trials": trials}


def main():
    parser = common_arguments("python -m benchmarks.quality.choices.gates", __doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--only", default="", help="names of choices that contain this")
    args = parser.parse_args()
    setting, rows = Setting.of(args), stored_rows(args.out)
    with evaluating(setting.model), torch.no_grad():
        setting.measure_dense()
        for name, choice in CHOICES.items():
            if setting.late() or args.only not in name or f"gates: {name}" in {row["name"] for row in rows}:
                continue
            rows.append(row_of(setting, choice, name, args))
            setting.store(rows)


if __name__ == "__main__":
    main()
