# SPDX-License-Identifier: Apache-2.0
"""Build policies of one density for the ways to choose blocks that `tasks.py` compares."""

from dataclasses import replace
from functools import lru_cache

import torch
from last_query_probe import LastQueryProbe
from task_scores import dense_losses, perplexity_rise, shown

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.suite import make_task, named_tasks
from dynaxx.lab.tune.costs import BUDGETS, Allocator, Costs, rule_of
from dynaxx.lab.tune.sensitivity import measure_head_costs
from dynaxx.layout import as_block_size
from dynaxx.policy.resolve import head_rules, resolve
from dynaxx.selection import TileQueries

BY_COSTS = {"tuned", "even", "tasks"}  # methods whose budgets come from the costs of the heads
LEFT_OUT = {"tuned": "tuned on the other texts", "even": "evenly tuned on the other texts"}
LOCAL = 64  # tokens up to each q block's end that uniform methods always see
TUNED, EVEN, BY_TASKS, WINDOW = "tuned", "evenly tuned", "tuned on texts and tasks", "window and sink"
TUNE_FORCED = "mean query, forced blocks of tune"
UNIFORM = {
    "mean query": dx.MeanQuery(),
    "bounds of keys (Quest)": dx.MinMax(),
    "anti-diagonals (XAttention)": dx.AntiDiagonal(),
    "vertical and slash lines of the last queries (MInference)": LastQueryProbe(),
    TUNE_FORCED: dx.MeanQuery(),
}
METHODS = {
    "tuned": TUNED,
    "even": EVEN,
    "tasks": BY_TASKS,
    **dict(zip(("mean", "quest", "xattention", "minference", "forced"), UNIFORM, strict=True)),
    "window": WINDOW,
}
FINE_BUDGETS = (
    *(0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1.0),
)


def block_size(text):
    """Read a size of blocks, such as "32" or "16x32"."""
    sizes = as_block_size(tuple(int(each) for each in text.split("x")) * (1 if "x" in text else 2))
    return sizes if "x" in text else sizes[0]


def policy_of(model, rules, block):
    return dx.Policy(model=model_facts(model), block_size=block, rules=tuple(rules))


def density_of(rule, tokens, block):
    """Return the density of a rule. It depends on the number of blocks alone, so one small head on a CPU tells it."""
    q, k = torch.randn(2, 1, tokens, 1, 16)
    return dx.select_blocks(q, k, rule, block_size=block).density()


@lru_cache(maxsize=1024)
def cached_density(rule, tokens, block):
    """Return the density of a rule, which does not depend on its scorer."""
    if isinstance(rule, dx.Hybrid) and isinstance(rule.selector, dx.TopK):
        rule = replace(rule, selector=replace(rule.selector, scorer=dx.MeanQuery()))
    return density_of(rule, tokens, block)


def at_density(make, tokens, density, block):
    """Return the densest rule of a family within a density, and its density."""
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if density_of(make(middle), tokens, block) <= density else (low, middle)
    return make(low), density_of(make(low), tokens, block)


def forced_blocks(name, block):
    """Return the blocks that a method with one budget always shows."""
    kv_block = as_block_size(block)[1]
    if name == TUNE_FORCED:
        return rule_of(dx.MeanQuery(), 0.0, block, 64, 0).pattern
    return dx.Sink(kv_block) | dx.LocalBlocks(max(1, LOCAL // kv_block))


def uniform_policies(model, tokens, density, methods, block):
    """Yield name, policy and density of every method with one budget for all heads."""
    for name in methods:
        if name == WINDOW:
            kv_block = as_block_size(block)[1]
            window = lambda x, kv_block=kv_block: dx.Sink(kv_block) | dx.SlidingWindow(max(1, int(x)))
            spans = [kv_block * n for n in range(1, tokens // kv_block + 1)]
            static = lambda w: window(w).layout(tokens, causal=True, block_size=block).density()  # noqa: B023
            span = max((w for w in spans if static(w) <= density), default=spans[0])
            yield name, policy_of(model, [dx.Rule.of(window(span))], block), static(span)
        elif name in UNIFORM:
            forced, scorer = forced_blocks(name, block), UNIFORM[name]
            same = name if forced_blocks("", block) != forced else ""  # scorers do not change the density
            budget = budget_at(same, tokens, density, block)
            rule = forced | dx.TopK(budget, scorer)
            yield name, policy_of(model, [dx.Rule.of(rule)], block), density_of(forced | dx.TopK(budget), tokens, block)


@lru_cache
def budget_at(name, tokens, density, block):
    """Return the largest budget of a method with one budget within a density."""
    forced = forced_blocks(name, block)
    rule, _ = at_density(lambda budget: forced | dx.TopK(float(budget)), tokens, density, block)
    return rule.selector.budget


def head_costs(model, ids, rules, block, last=None):
    """Return the costs of budgets on a text, or on a prompt whose `last` tokens count, as JSON data."""
    found = measure_head_costs(model, ids, rules, block_size=block, last=last)
    loss = torch.cat([each.loss for each in found], dim=1)
    density = [[density_of(rule, ids.shape[1] - 1, block)] * loss.shape[1] for rule in rules]
    return {"layers": [each.layer for each in found], "density": density, "loss": loss.tolist()}


def costs_from(plain):
    scorer = dx.MeanQuery()
    return Costs(
        tuple(plain["layers"]), {scorer: torch.tensor(plain["density"])}, {scorer: torch.tensor(plain["loss"])}
    )


def scorers_of(args):
    """Return the scorers that heads of the tuned methods choose from."""
    return [scorer_named(name) for name in args.scorers.split(",")]


def scorer_named(name):
    """Return a scorer by its name and tokens, such as "mean", "tile 8", "anti 16" or "bounds"."""
    kind, _, tokens = name.partition(" ")
    if kind == "mean":
        return dx.MeanQuery(sharpness=float(tokens or 0.75))
    return {"tile": TileQueries, "anti": dx.AntiDiagonal}[kind](int(tokens)) if tokens else dx.MinMax()


def budget_rule(args, scorer, budget):
    """Return the rule of a scorer and one budget, or one per head."""
    kv_block = as_block_size(args.block_size)[1]
    found = rule_of(scorer, budget, args.block_size, args.last, round(args.tokens * args.floor) // kv_block)
    pattern = dx.Sink(kv_block) | dx.LocalBlocks(max(2, args.local // kv_block)) | dx.LastQueries(args.last)
    return pattern | found.selector


def candidates(args):
    """Return the scorers and budgets that heads choose from."""
    budgets = FINE_BUDGETS if args.fine else BUDGETS
    return [(scorer, budget) for scorer in scorers_of(args) for budget in budgets]


def candidate_rules(args):
    return [budget_rule(args, scorer, budget) for scorer, budget in candidates(args)]


def head_policy_rules(layer, chosen, args):
    """Return the rules of a layer whose heads have these (scorer, budget)."""
    heads_of = {}
    for head, (scorer, _) in enumerate(chosen):
        heads_of.setdefault(scorer, []).append(head)
    rules = []
    for scorer, heads in heads_of.items():
        rule = budget_rule(args, scorer, tuple(float(chosen[head][1]) for head in heads))
        rules.append(dx.Rule.of(rule, layers=[layer], heads="all" if len(heads) == len(chosen) else heads))
    return rules


def best_choice(costs, density):
    """Return the allocation of the smallest predicted loss at a density."""
    scorer = dx.MeanQuery()
    return Allocator(costs.density[scorer], costs.loss[scorer]).at(density)


def tuned_policy(model, costs, args, density):
    """Return the policy of the smallest predicted loss at a density, and its density."""
    found, every = best_choice(costs, density), candidates(args)
    heads = found.choice.view(len(costs.layers), -1).tolist()
    rules = [
        rule
        for layer, row in zip(costs.layers, heads, strict=True)
        for rule in head_policy_rules(layer, [every[each] for each in row], args)
    ]
    return policy_of(model, rules, args.block_size), found.density


def predicted_losses(costs, choice):
    """Return the predicted loss of an allocation on each text."""
    return torch.stack([each.loss[dx.MeanQuery()].gather(0, choice[None]).sum() for each in costs])


def evened(costs, density, ratios, rounds=60, rate=0.3):
    """Return a weighted mean of costs whose best allocation has the smallest largest rise over the texts.

    Args:
        costs: the costs on each text.
        density: the density of the allocation.
        ratios: measured rise per predicted loss of each text.
        rounds: number of changes of the weights.
        rate: how much a text's weight grows with its rise.
    """
    weights, best, scorer = torch.ones(len(costs), dtype=torch.float64), None, dx.MeanQuery()
    losses = torch.stack([each.loss[scorer] for each in costs])
    for _ in range(rounds):
        weights = weights / weights.sum()
        mixed = Costs.mean(costs)._replace(loss={scorer: (weights[:, None, None] * losses).sum(0)})
        rises = ratios * predicted_losses(costs, best_choice(mixed, density).choice)
        if best is None or rises.max() < best[0]:
            best = rises.max(), mixed
        weights = weights * (rate * (rises / rises.mean() - 1)).exp()
    return best[1]


def task_costs(model, tokenizer, text, names, args):
    """Return the mean costs on samples of tasks, where only the answers' tokens count."""
    haystack, found = Haystack(text), []
    for name in names:
        for index in range(args.cost_samples):
            sample = make_task(name, tokenizer, haystack, args.tokens, seed=args.seed + 1000, index=index)
            ids = torch.cat([sample.prompt, sample.answer[None]], 1)
            plain = head_costs(model, ids, candidate_rules(args), args.block_size, last=len(sample.answer))
            found.append(costs_from(plain))
    return Costs.mean(found)


def text_costs(model, texts, args, remember):
    """Return the costs on each text, the mean over its stretches (1, tokens + 1)."""
    rules = candidate_rules(args)
    found = []
    for index, each in enumerate(texts):
        make = lambda each=each: [head_costs(model, ids, rules, args.block_size) for ids in each]
        found.append(Costs.mean([costs_from(plain) for plain in remember(f"costs {index}", make)]))
        shown(f"costs of text {index}")
    return found


def rises_per_loss(model, costs, texts, args, density, remember):
    """Return the measured rise on each text per predicted loss, under budgets by the mean of all costs."""
    mean = Costs.mean(costs)
    policy, _ = tuned_policy(model, mean, args, density)

    def measured():
        return perplexity_rise(model, policy, texts, dense_losses(model, texts))

    rises = torch.tensor(remember(f"calibration|{density}", measured), dtype=torch.float64)
    shown(f"rises on the texts that are tuned on at {density:.1%}: {rises.tolist()}")
    return rises.clamp(min=1e-4) / predicted_losses(costs, best_choice(mean, density).choice)


def tuned_policies(model, tokenizer, texts, costs, ratios, methods, args):
    """Yield name, policy and density of budgets per head, by costs on texts, and on texts and tasks."""
    by_text = Costs.mean(costs)
    for density in args.density:
        if TUNED in methods:
            yield TUNED, *tuned_policy(model, by_text, args, density)
        if EVEN in methods:
            mixed = evened(costs, density, ratios[density])
            yield EVEN, *tuned_policy(model, mixed, args, density)
    if BY_TASKS not in methods:
        return
    names = named_tasks(tuple(args.cost_tasks.split(",")))
    by_task = task_costs(model, tokenizer, texts[0], names, args)
    share = lambda costs, scorer: costs.loss[scorer] / costs.loss[scorer][0].sum()  # of the loss at the smallest budget
    added = lambda scorer: share(by_text, scorer) + args.task_weight * share(by_task, scorer)
    both = by_text._replace(loss={scorer: added(scorer) for scorer in by_text.loss})
    for density in args.density:
        yield BY_TASKS, *tuned_policy(model, both, args, density)


def left_out_rises(model, costs, ratios, held_out, losses, args, density, even):
    """Return the rise of perplexity on each text, under a policy from the costs on all other texts."""
    found = []
    for index, (ids, before) in enumerate(zip(held_out, losses, strict=True)):
        rest = [other for other in range(len(costs)) if other != index]
        others = [costs[other] for other in rest]
        mixed = evened(others, density, ratios[density][rest]) if even else Costs.mean(others)
        policy, _ = tuned_policy(model, mixed, args, density)
        found += perplexity_rise(model, policy, [ids], [before])
    return found


def methods_of(model, tokenizer, texts, costs, ratios, tune_on, args, remember):
    """Return (name, policy, density) of every method at every density."""
    methods = [METHODS[each] for each in args.methods.split(",") if each]

    def make():
        found = [*tuned_policies(model, tokenizer, texts, costs, ratios, methods, args)] if costs else []
        for density in args.density:
            found += uniform_policies(model, args.tokens, density, methods, args.block_size)
        return [[name, policy.model_dump(mode="json"), density] for name, policy, density in found]

    found = remember("methods", make) if methods else []
    return [*from_files(args), *((name, dx.Policy.model_validate(policy), share) for name, policy, share in found)]


def from_files(args):
    """Yield name, policy and density of the policies of `--policy`."""
    for given in args.policy:
        name, _, path = given.partition("=")
        policy = dx.load_policy(path)
        yield name, policy, policy_density(policy, args.tokens)


def policy_density(policy, tokens):
    """Return the mean density of a policy's prompts over the heads of its layers, those without a rule as dense."""
    rules, shares = head_rules(policy), []
    for layer, plan in resolve(policy).items():
        for head in range(policy.model.q_heads):
            rule = rules[layer].get(head)
            shares.append(1.0 if rule is None else cached_density(rule, tokens, plan.block_size))
    return sum(shares) / len(shares)
