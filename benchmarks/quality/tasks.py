# SPDX-License-Identifier: Apache-2.0
"""Measure what ways to choose blocks lose on long-context tasks, at equal density.

    python benchmarks/quality/tasks.py smollm2 --tokens 1024 --density 0.35 --samples 2 --json

Each method runs in every layer that sees its whole context, at one budget for all heads, except four whose budgets
come from the costs of the heads: "tuned" by their mean over the texts, "even" so that the text that rises most rises
least, "shared" with layers that read the blocks of earlier ones, "tasks" by texts and other samples of the tasks. With
several `--scorers`, each head takes the one that loses least. `--policy` adds policies from files.
Texts and prompts start as the tokenizer starts them (Gemma: <bos>). Layers with a window keep the model's own
attention. Finished rows are stored in
`--state`, so an interrupted run continues; several processes share the tasks with a state each, and `--show` prints
the rows of all.
"""

import argparse
import contextlib
import copy
import json
import math
import sys
import time
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import apply, model_facts
from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import logits_of, token_losses
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.result import judged
from dynaxx.lab.tasks.score import closed_book, other_answers
from dynaxx.lab.tasks.suite import DEFINITIONS, make_task, named_tasks
from dynaxx.lab.texts import encode, load_text, split_text, started
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.costs import BUDGETS, LOCAL_TOKENS, Costs, rule_of
from dynaxx.lab.tune.sensitivity import measure_head_costs
from dynaxx.lab.tune.sharing import REACH, SharedCosts, likeness, matched, shared_costs, shared_lists
from dynaxx.layout import as_block_size
from dynaxx.policy.resolve import head_rules, resolve

STARTED = time.monotonic()
BY_COSTS = {"tuned", "even", "shared", "tasks"}  # methods whose budgets come from the costs of the heads
LEFT_OUT = {"tuned": "tuned on the other texts", "even": "evenly tuned on the other texts"}
TOGETHER = 6  # prompts whose caches are held at once, since applying a policy takes time
LOCAL = 64  # tokens up to each q block's end that uniform methods always see
TUNED, EVEN, BY_TASKS, WINDOW = "tuned", "evenly tuned", "tuned on texts and tasks", "window and sink"
SHARED = "tuned, layers share blocks"
TUNE_FORCED = "mean query, forced blocks of tune"
UNIFORM = {
    "mean query": dx.MeanQuery(),
    "bounds of keys (Quest)": dx.MinMax(),
    "anti-diagonals (XAttention)": dx.AntiDiagonal(),
    "vertical and slash lines of the last queries (MInference)": dx.LastQueryProbe(),
    TUNE_FORCED: dx.MeanQuery(),
}
METHODS = {
    "tuned": TUNED,
    "even": EVEN,
    "shared": SHARED,
    "tasks": BY_TASKS,
    **dict(zip(("mean", "quest", "xattention", "minference", "forced"), UNIFORM, strict=True)),
    "window": WINDOW,
}
FINE_BUDGETS = (
    *(0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1.0),
)
COST_TASKS = "niah_multikey_1,niah_multivalue,vt,cwe,qa_1"
TASKS = "niah_single_2,niah_multikey_1,niah_multivalue,vt,cwe"


def block_size(text):
    """Read a size of blocks, such as "32" or "16x32"."""
    sizes = as_block_size(tuple(int(each) for each in text.split("x")) * (1 if "x" in text else 2))
    return sizes if "x" in text else sizes[0]


def stretches(tokenizer, text, tokens, count):
    """Return consecutive stretches of a text, each (1, tokens + 1), with the tokenizer's start."""
    ids = encode(tokenizer, text, count * tokens + 1)
    return [started(tokenizer, ids[:, i * tokens : (i + 1) * tokens + 1]) for i in range(count)]


def policy_of(model, rules, block):
    return dx.Policy(model=model_facts(model), block_size=block, rules=tuple(rules))


def applied(model, policy):
    """Return the handle of a policy beside the model's own attention in layers with a window."""
    return apply(model, policy, own_pattern=False)


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
    return Costs.plain(measure_head_costs(model, ids, rules, block_size=block, last=last))


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
    return {"tile": dx.TileQueries, "anti": dx.AntiDiagonal}[kind](int(tokens)) if tokens else dx.MinMax()


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


def shared_text_costs(model, texts, args):
    """Return the costs of reading other layers' blocks, the mean over all texts."""
    (scorer,) = scorers_of(args)
    rule = lambda budget: budget_rule(args, scorer, budget)
    every = [ids for each in texts for ids in each]
    alike = [likeness(model, ids, scorer, rule(0.0), args.block_size) for ids in every]
    matches = matched(torch.stack(alike).mean(0), min(REACH, alike[0].shape[0] - 1))
    found = []
    for ids in every:
        found.append(shared_costs(model, ids, rule, matches, block_size=args.block_size))
        shown(f"costs of shared blocks {len(found)}/{len(every)}")
    return SharedCosts.mean(found)


def shared_policy(model, costs, args, density):
    """Return the policy in which `--choosing` layers choose and the others read their blocks, and its density."""
    lists = shared_lists(costs, args.choosing, density)
    found, budgets, _ = lists.at(density)
    (scorer,) = scorers_of(args)
    rules = [
        dx.Rule.of(budget_rule(args, scorer, tuple(row)), layers=[layer])
        for layer, row in zip(costs.layers, budgets, strict=True)
    ]
    policy = policy_of(model, rules, args.block_size)
    return policy.replace(shared=lists.shared()), found


def tuned_policies(model, tokenizer, texts, costs, ratios, shared, methods, args):
    """Yield name, policy and density of budgets per head, by costs on texts, and on texts and tasks."""
    by_text = Costs.mean(costs)
    for density in args.density:
        if TUNED in methods:
            yield TUNED, *tuned_policy(model, by_text, args, density)
        if EVEN in methods:
            mixed = evened(costs, density, ratios[density])
            yield EVEN, *tuned_policy(model, mixed, args, density)
        if SHARED in methods:
            yield SHARED, *shared_policy(model, shared, args, density)
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


def dense_losses(model, texts):
    """Return the dense losses of the stretches of each text."""
    return [[token_losses(model, ids) for ids in each] for each in texts]


def perplexity_rise(model, policy, texts, dense):
    """Return the relative rise of perplexity on each text, a list of stretches, given its dense losses."""
    found = []
    with applied(model, policy):
        for each, before in zip(texts, dense, strict=True):
            rise = torch.cat([token_losses(model, ids) - known for ids, known in zip(each, before, strict=True)])
            found.append(float(rise.double().mean().expm1()))
    return found


@torch.no_grad()
def scored(model, samples, policy=None, others=False):
    """Return what each of the samples scores under a policy, or dense.

    A prompt is one prefill. Its answer then follows densely in one pass.

    Args:
        model: the model.
        samples: samples of one task.
        policy: the policy of the prompts.
        others: also score the answers of other samples after each prompt.

    Returns:
        The log-probability per token, the share of the answers whose tokens are all the most likely ones, and with
        `others` how much higher that log-probability is than that of the other answers; None without any.
    """
    found = []
    for at in range(0, len(samples), TOGETHER):
        some = samples[at : at + TOGETHER]
        with applied(model, policy) if policy is not None else contextlib.nullcontext() as handle:
            read = [model.base_model(each.prompt.to(model.device), use_cache=True) for each in some]
            assert handle is None or handle.stats()["sparse_calls"] > 0, "the prompts ran dense"
        for index, (sample, one) in enumerate(zip(some, read, strict=True), at):
            wrong = other_answers(samples, index) if others else ()
            rest = [answered(model, each, copy.deepcopy(one))[0] for each in wrong]
            logprob, match = answered(model, sample.answer, one, sample.ends)
            gap = (logprob - sum(rest) / len(rest) if rest else None,) if others else ()
            found.append((logprob, match, *gap))
    return found


def answered(model, answer, read, ends=()):
    """Score an answer (a,) after a prompt; `ends` are the numbers of its tokens up to each of its parts."""
    answer, cache = answer.to(model.device), cache_of(read)
    hidden = [read[0][:, -1:]]
    if len(answer) > 1:
        hidden.append(model.base_model(answer[None, :-1], use_cache=True, **with_cache(model.base_model, cache))[0])
    logprobs = logits_of(model, torch.cat(hidden, 1))[0].log_softmax(-1)
    right = logprobs.argmax(-1) == answer
    found = [bool(right[a:b].all()) for a, b in zip((0, *ends), ends, strict=False)]
    return float(logprobs.gather(1, answer[:, None]).mean()), sum(found) / max(1, len(found))


def interval_text(found):
    """Return the text of a stored interval, or nothing for None."""
    return "" if found is None else f"{found['mean']:+.2f} ± {(found['high'] - found['low']) / 2:.2f}"


def flat(method, density, row):
    """Return one row of the table."""
    drop = row["drop"]
    return {
        "task": row["task"],
        "tokens": row["tokens"],
        "samples": row["samples"],
        "method": method,
        "density": f"{density:.1%}",
        "dense finds": f"{row['dense_match']['mean']:.0%}",
        "right answers above others": interval_text(row.get("preference")),
        "finds": f"{row['sparse_match']['mean']:.0%}",
        "nats lost per answer token": f"{drop['mean']:+.2f}",
        "95 % interval": f"{drop['low']:+.2f} to {drop['high']:+.2f}",
        "verdict": row["verdict"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", action="append", default=None, help="haystack and costs; further ones for costs")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--density", type=float, nargs="+", default=[0.35])
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--methods", default=",".join(METHODS), help=f"some of {', '.join(METHODS)}, by ','")
    parser.add_argument("--cost-tasks", default=COST_TASKS, help="tasks whose other samples give costs")
    parser.add_argument("--cost-samples", type=int, default=1)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--task-weight", type=float, default=1.0, help="of costs of tasks beside those of texts")
    parser.add_argument("--scorers", default="mean", help="mean, 'tile N', 'anti N', bounds; several: best by head")
    parser.add_argument("--fine", action="store_true", help="more budgets to choose from, and smaller ones")
    parser.add_argument("--floor", type=float, default=0.5, help="rows of fewer tokens than this share count as it")
    parser.add_argument("--local", type=int, default=LOCAL_TOKENS, help="tokens before each row that are always seen")
    parser.add_argument("--last", type=int, default=64, help="last queries that see everything")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=FILE", help="a further method")
    parser.add_argument("--choosing", type=int, default=15, help="layers that choose blocks, for the method shared")
    parser.add_argument("--block-size", type=block_size, default=32, help="16, 32x16, ... (queries x keys)")
    parser.add_argument("--stretches", type=int, default=1, help="of each text, for costs and for perplexity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--state", type=Path, default=Path("benchmarks-tasks-state.json"))
    parser.add_argument("--write", type=Path, default=None, help="folder for the policies of the methods")
    parser.add_argument("--only-policies", action="store_true", help="run no task: only perplexity, by text")
    parser.add_argument("--only-tasks", action="store_true", help="do not measure perplexity")
    parser.add_argument("--show", type=Path, nargs="+", help="print the rows of these states and measure nothing")
    parser.add_argument("--side-by-side", action="store_true", help="one row per task and density, methods as columns")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = stored_rows(args.show) if args.show else measured_rows(args)
    if args.side_by_side:
        rows = side_by_side(rows, args.density)
    elif args.only_policies:
        rows = by_text(rows, args.text or ["pydoc"])
    print(json.dumps({"rows": rows}) if args.json else "\n".join(map(str, rows)))


def by_text(rows, texts):
    """Return one row per method and density with the rise of perplexity on each text as a column."""
    names = [Path(each).stem for each in texts]
    shown = [row for row in rows if row["task"] == "perplexity"]
    return [
        {"method": row["method"], "blocks": row["density"], **dict(zip(names, row["rise"].split(), strict=True))}
        for row in shown
    ]


SHORT = {
    "window and sink": "window, sink",
    "vertical and slash lines of the last queries (MInference)": "MInference-like",
    "anti-diagonals (XAttention)": "XAttention-like",
    "bounds of keys (Quest)": "Quest-like",
}


MARKS = {"holds": " ✓", "fails": " ✗"}


def side_by_side(rows, densities):
    """Return one row per density and task. A cell is what a method finds, and the nats that it loses per token.

    Rows with the task "perplexity" have the rise of perplexity on each text instead, and rows with the task "all" the
    number of tasks that hold, are unclear and fail.
    """
    found, verdicts = {}, {}
    for row in rows:
        density = min(densities, key=lambda each: abs(each - float(row["density"].rstrip("%")) / 100))
        new = lambda name, density=density: found.setdefault(
            (density, name), {"blocks": f"{density:.0%}", "task": name}
        )
        method, task = SHORT.get(row["method"], row["method"]), new(row["task"])
        if row["task"] == "perplexity":
            task[method] = row["rise"]
            continue
        task["dense"] = row["dense finds"]
        low, high = map(float, row["95 % interval"].split(" to "))
        cell = f"{row['finds']}, {row['nats lost per answer token']} ± {(high - low) / 2:.2f}"
        task[method] = cell + MARKS.get(row["verdict"], "" if row["verdict"] == "unclear" else f" {row['verdict']}")
        verdicts.setdefault((density, method), []).append(row["verdict"])
        counts = [verdicts[density, method].count(each) for each in ("holds", "unclear", "fails")]
        new("all")[method] = "{} hold, {} unclear, {} fail".format(*counts)
    order = {name: index for index, name in enumerate(("all", "perplexity", *DEFINITIONS))}
    methods = dict.fromkeys(name for row in found.values() for name in row if name not in ("blocks", "task", "dense"))
    shown = sorted(methods, key=lambda name: (not name.startswith("tuned"), name))
    ordered = sorted(found.items(), key=lambda each: (each[0][0], order[each[0][1]]))
    return [{name: row.get(name, "") for name in ("blocks", "task", "dense", *shown)} for _, row in ordered]


def stored_rows(paths):
    """Return the rows of stored results, each once."""
    found, known = [], set()
    for path in paths:
        results = json.loads(path.read_text("utf-8"))["results"]
        for key in results:
            task, _, method = key.partition(" ")
            name, _, density = method.rpartition("|")
            if key in known or not name:
                continue
            known.add(key)
            if task in DEFINITIONS:
                found.append(flat(name, float(density), results[key]))
            elif task == "perplexity":
                rise = " ".join(f"{each:+.1%}" for each in results[key])
                found.append({"task": task, "method": name, "density": f"{float(density):.1%}", "rise": rise})
    return found


def methods_of(model, tokenizer, texts, costs, ratios, tune_on, args, remember):
    """Return (name, policy, density) of every method at every density."""
    methods = [METHODS[each] for each in args.methods.split(",") if each]

    def make():
        shared = shared_text_costs(model, tune_on, args) if SHARED in methods else None
        found = [*tuned_policies(model, tokenizer, texts, costs, ratios, shared, methods, args)] if costs else []
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


def shown(what):
    """Print a finished step and the seconds since the start on stderr."""
    print(f"{time.monotonic() - STARTED:.1f} s: {what}", file=sys.stderr, flush=True)


def measured_rows(args):
    """Measure all methods on all tasks."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model, tokenizer = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    parts = [split_text(load_text(each)) for each in args.text or ["pydoc"]]
    texts, held_out = [each.calibration for each in parts], [each.held_out for each in parts]
    tune_on, ids = (
        [stretches(tokenizer, each, args.tokens, args.stretches) for each in half] for half in (texts, held_out)
    )
    kept = (
        *("tokens", "density", "samples", "seed", "dtype", "methods", "cost_tasks", "cost_samples", "block_size"),
        *("choosing", "task_weight", "scorers", "fine", "floor", "local", "last"),
    )
    steps = Steps(args.state, fingerprint(model, tune_on[0][0], **{name: getattr(args, name) for name in kept}))
    haystack, methods = Haystack(held_out[0]), args.methods.split(",")
    with evaluating(model):
        costs = text_costs(model, tune_on, args, steps.remember) if BY_COSTS & {*methods} else []
        densities = args.density if "even" in methods else ()
        ratios = {each: rises_per_loss(model, costs, tune_on, args, each, steps.remember) for each in densities}
        policies = methods_of(model, tokenizer, texts, costs, ratios, tune_on, args, steps.remember)
        for name, policy, density in policies if args.write else ():
            args.write.mkdir(parents=True, exist_ok=True)
            dx.save_policy(policy, args.write / f"{name.replace(', ', '_').replace(' ', '_')}_{density:.3f}.json")
        shown("policies of the methods")
        losses = [] if args.only_tasks else dense_losses(model, ids)
        shown(f"dense perplexity {[round(math.exp(float(torch.cat(each).mean())), 2) for each in losses]}")
        for name, policy, density in policies if losses else ():
            rise = lambda policy=policy: perplexity_rise(model, policy, ids, losses)
            found = steps.remember(f"perplexity {name}|{density}", rise)
            shown(f"perplexity of {name} at {density:.1%}: {' '.join(f'{each:+.2%}' for each in found)}")
        for density, method in product(args.density if len(costs) > 2 and losses else (), LEFT_OUT):
            if method not in methods:
                continue
            given = (model, costs, ratios, ids, losses, args, density, method == "even")
            name = f"perplexity {LEFT_OUT[method]}|{density}"
            found = steps.remember(name, lambda given=given: left_out_rises(*given))
            shown(f"{name} {' '.join(f'{each:+.2%}' for each in found)}")
        tasks = () if args.only_policies else named_tasks(tuple(args.tasks.split(",")))
        for task in tasks:  # a run that is stopped has whole tasks
            make = lambda index: make_task(task, tokenizer, haystack, args.tokens, seed=args.seed, index=index)  # noqa: B023
            samples = [make(index) for index in range(args.samples)]
            dense = steps.remember(f"dense {task}", lambda: scored(model, samples, others=True))  # noqa: B023
            known = steps.remember(f"known {task}", lambda: [closed_book(model, each) for each in samples])  # noqa: B023
            others = [None if gap is None else logprob - gap for logprob, _, gap in dense]
            shown(f"{task} dense")
            for name, policy, density in policies:

                def compared(policy=policy):
                    sparse = scored(model, samples, policy)  # noqa: B023
                    before = [each[:2] for each in dense]  # noqa: B023
                    return asdict(judged(task, args.tokens, before, sparse, known, 0.1, others=others))  # noqa: B023

                steps.remember(f"{task} {name}|{density}", compared)
                shown(f"{task} of {name} at {density:.1%}")
    return stored_rows([args.state])


if __name__ == "__main__":
    main()
