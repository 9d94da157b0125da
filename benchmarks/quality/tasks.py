# SPDX-License-Identifier: Apache-2.0
"""Measure what ways to choose blocks lose on long-context tasks, at equal density.

    python benchmarks/quality/tasks.py smollm2 --tokens 1024 --density 0.35 --samples 2 --json

Each method runs in every layer that sees its whole context, at one budget for all heads, except "tuned", whose budgets
come from the costs of the heads, on texts or on texts and on other samples of the tasks. Finished rows are stored in
`--state`, so an interrupted run continues; several processes share the tasks with a state each, and `--show` prints
the rows of all.
"""

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict
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
from dynaxx.lab.tasks.score import closed_book
from dynaxx.lab.tasks.suite import DEFINITIONS, make_task, named_tasks
from dynaxx.lab.texts import encode, load_text, split_text
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.costs import BUDGETS, Costs, rule_of
from dynaxx.lab.tune.sensitivity import measure_head_costs

BLOCK = 32
STARTED = time.monotonic()
LEFT_OUT = "tuned on the other texts"
TOGETHER = 6  # prompts whose caches are held at once, since applying a policy takes time
FORCED = dx.Sink(BLOCK) | dx.LocalBlocks(2)
TUNED, BY_TASKS, WINDOW = "tuned", "tuned on texts and tasks", "window and sink"
UNIFORM = {
    "mean query": (FORCED, dx.MeanQuery()),
    "bounds of keys (Quest)": (FORCED, dx.MinMax()),
    "anti-diagonals (XAttention)": (FORCED, dx.AntiDiagonal()),
    "vertical and slash lines of the last queries (MInference)": (FORCED, dx.LastQueryProbe()),
    "mean query, forced blocks of tune": (rule_of(dx.MeanQuery(), 0.0, BLOCK, 64, 0).pattern, dx.MeanQuery()),
}
METHODS = {
    "tuned": TUNED,
    "tasks": BY_TASKS,
    **dict(zip(("mean", "quest", "xattention", "minference", "forced"), UNIFORM, strict=True)),
    "window": WINDOW,
}
COST_TASKS = "niah_multikey_1,niah_multivalue,vt,cwe,qa_1"
TASKS = "niah_single_2,niah_multikey_1,niah_multivalue,vt,cwe"


def policy_of(model, rules):
    return dx.Policy(model=model_facts(model), block_size=BLOCK, rules=tuple(rules))


def density_of(model, rule, tokens):
    """Return the density of a rule on random queries and keys; it depends on the number of blocks alone."""
    facts = model_facts(model)
    q, k = (
        torch.randn(1, tokens, heads, facts.head_dim, device=model.device) for heads in (facts.q_heads, facts.kv_heads)
    )
    return dx.select_blocks(q, k, rule, block_size=BLOCK).density()


def at_density(model, make, tokens, density, low, high):
    """Return the densest rule of a family within a density, and its density."""
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if density_of(model, make(middle), tokens) <= density else (low, middle)
    return make(low), density_of(model, make(low), tokens)


def uniform_policies(model, tokens, density, methods):
    """Yield name, policy and density of every method with one budget for all heads."""
    for name in methods:
        if name == WINDOW:
            window = lambda x: dx.Sink(BLOCK) | dx.SlidingWindow(max(1, int(x)))
            spans = [BLOCK * n for n in range(1, tokens // BLOCK + 1)]
            static = lambda w: window(w).layout(tokens, causal=True, block_size=BLOCK).density()  # noqa: B023
            span = max((w for w in spans if static(w) <= density), default=spans[0])
            yield name, policy_of(model, [dx.Rule.of(window(span))]), static(span)
        elif name in UNIFORM:
            forced, scorer = UNIFORM[name]
            make = lambda budget, forced=forced, scorer=scorer: forced | dx.TopK(float(budget), scorer)
            rule, found = at_density(model, make, tokens, density, 0.0, 1.0)
            yield name, policy_of(model, [dx.Rule.of(rule)]), found


def head_costs(model, ids, rules, last=None):
    """Return the costs of budgets on a text, or on a prompt whose `last` tokens count, as JSON data."""
    return Costs.plain(measure_head_costs(model, ids, rules, block_size=BLOCK, last=last))


def costs_from(plain):
    scorer = dx.MeanQuery()
    return Costs(
        tuple(plain["layers"]), {scorer: torch.tensor(plain["density"])}, {scorer: torch.tensor(plain["loss"])}
    )


def budget_rules(tokens, budgets):
    return [rule_of(dx.MeanQuery(), budget, BLOCK, 64, tokens // BLOCK // 2) for budget in budgets]


def tuned_policy(model, costs, tokens, density):
    """Return the policy of the smallest predicted loss at a density, and its density."""
    scorer = dx.MeanQuery()
    found = Allocator(costs.density[scorer], costs.loss[scorer]).at(density)
    rows = [tuple(row) for row in costs.budgets(found.choice)]
    rules = zip(costs.layers, budget_rules(tokens, rows), strict=True)
    return policy_of(model, [dx.Rule.of(rule, layers=[layer]) for layer, rule in rules]), found.density


def task_costs(model, tokenizer, text, names, tokens, samples, seed):
    """Return the mean costs on samples of tasks, where only the answers' tokens count."""
    haystack, found = Haystack(text), []
    for name in names:
        for index in range(samples):
            sample = make_task(name, tokenizer, haystack, tokens, seed=seed, index=index)
            ids = torch.cat([sample.prompt, sample.answer[None]], 1)
            plain = head_costs(model, ids, budget_rules(tokens, BUDGETS), last=len(sample.answer))
            found.append(costs_from(plain))
    return Costs.mean(found)


def text_costs(model, tokenizer, texts, args, remember):
    """Return the costs on each text."""
    ids = [encode(tokenizer, each, args.tokens + 1) for each in texts]
    make = lambda: [head_costs(model, each, budget_rules(args.tokens, BUDGETS)) for each in ids]
    return [costs_from(each) for each in remember("costs", make)]


def tuned_policies(model, tokenizer, texts, costs, methods, args):
    """Yield name, policy and density of budgets per head, by costs on texts, and on texts and tasks."""
    by_text = Costs.mean(costs)
    for density in args.density if TUNED in methods else ():
        yield TUNED, *tuned_policy(model, by_text, args.tokens, density)
    if BY_TASKS not in methods:
        return
    names = named_tasks(tuple(args.cost_tasks.split(",")))
    by_task = task_costs(model, tokenizer, texts[0], names, args.tokens, args.cost_samples, args.seed + 1000)
    scorer = dx.MeanQuery()
    share = lambda costs: costs.loss[scorer] / costs.loss[scorer][0].sum()  # of the loss at the smallest budget
    both = by_text._replace(loss={scorer: share(by_text) + share(by_task)})
    for density in args.density:
        yield BY_TASKS, *tuned_policy(model, both, args.tokens, density)


def left_out_rises(model, costs, held_out, losses, tokens, density):
    """Return the rise of perplexity on each text, under a policy from the costs on all other texts."""
    found = []
    for index, (ids, before) in enumerate(zip(held_out, losses, strict=True)):
        others = Costs.mean([each for other, each in enumerate(costs) if other != index])
        policy, _ = tuned_policy(model, others, tokens, density)
        found += perplexity_rise(model, policy, [ids], [before])
    return found


def perplexity_rise(model, policy, texts, dense):
    """Return the relative rise of perplexity on each text of token ids, given its dense losses."""
    found = []
    for ids, before in zip(texts, dense, strict=True):
        with apply(model, policy):
            found.append(float((token_losses(model, ids) - before).double().mean().expm1()))
    return found


@torch.no_grad()
def scored(model, samples, policy=None):
    """Return (log-probability per token, share of the answers whose tokens are all the most likely ones) of samples.

    A prompt is one prefill, dense or under a policy. Its answer then follows densely in one pass.
    """
    found = []
    for at in range(0, len(samples), TOGETHER):
        some = samples[at : at + TOGETHER]
        with apply(model, policy) if policy is not None else contextlib.nullcontext() as handle:
            read = [model.base_model(each.prompt.to(model.device), use_cache=True) for each in some]
            assert handle is None or handle.stats()["sparse_calls"] > 0, "the prompts ran dense"
        found += [answered(model, *each) for each in zip(some, read, strict=True)]
    return found


def answered(model, sample, read):
    """Score one sample after its prompt."""
    answer, cache = sample.answer.to(model.device), cache_of(read)
    hidden = [read[0][:, -1:]]
    if len(answer) > 1:
        hidden.append(model.base_model(answer[None, :-1], use_cache=True, **with_cache(model.base_model, cache))[0])
    logprobs = logits_of(model, torch.cat(hidden, 1))[0].log_softmax(-1)
    right = logprobs.argmax(-1) == answer
    starts = (0, *sample.ends)
    found = [bool(right[a:b].all()) for a, b in zip(starts, sample.ends, strict=False)]
    return float(logprobs.gather(1, answer[:, None]).mean()), sum(found) / len(found)


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--state", type=Path, default=Path("benchmarks-tasks-state.json"))
    parser.add_argument("--only-policies", action="store_true", help="run no task: only perplexity, by text")
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


def methods_of(model, tokenizer, texts, costs, args, remember):
    """Return (name, policy, density) of every method at every density."""
    methods = [METHODS[each] for each in args.methods.split(",")]

    def make():
        found = [*tuned_policies(model, tokenizer, texts, costs, methods, args)]
        for density in args.density:
            found += uniform_policies(model, args.tokens, density, methods)
        return [[name, policy.model_dump(mode="json"), density] for name, policy, density in found]

    return [(name, dx.Policy.model_validate(policy), density) for name, policy, density in remember("methods", make)]


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
    ids = encode(tokenizer, texts[0], args.tokens + 1)
    kept = ("tokens", "density", "samples", "seed", "dtype", "methods", "cost_tasks", "cost_samples")
    steps = Steps(args.state, fingerprint(model, ids, **{name: getattr(args, name) for name in kept}))
    haystack = Haystack(held_out[0])
    with evaluating(model):
        costs = text_costs(model, tokenizer, texts, args, steps.remember)
        shown("costs of the texts")
        methods = methods_of(model, tokenizer, texts, costs, args, steps.remember)
        shown("policies of the methods")
        ids = [encode(tokenizer, each, args.tokens + 1) for each in held_out]
        losses = [token_losses(model, each) for each in ids]
        for name, policy, density in methods:
            rise = lambda policy=policy: perplexity_rise(model, policy, ids, losses)
            steps.remember(f"perplexity {name}|{density}", rise)
            shown(f"perplexity of {name} at {density:.1%}")
        for density in args.density if len(costs) > 1 else ():
            rise = lambda density=density: left_out_rises(model, costs, ids, losses, args.tokens, density)
            steps.remember(f"perplexity {LEFT_OUT}|{density}", rise)
            shown(f"perplexity of {LEFT_OUT} at {density:.1%}")
        tasks = () if args.only_policies else named_tasks(tuple(args.tasks.split(",")))
        for task in tasks:  # a run that is stopped has whole tasks
            make = lambda index: make_task(task, tokenizer, haystack, args.tokens, seed=args.seed, index=index)  # noqa: B023
            samples = [make(index) for index in range(args.samples)]
            dense = steps.remember(f"dense {task}", lambda: scored(model, samples))  # noqa: B023
            known = steps.remember(f"known {task}", lambda: [closed_book(model, each) for each in samples])  # noqa: B023
            for name, policy, density in methods:

                def compared(policy=policy):
                    sparse = scored(model, samples, policy)  # noqa: B023
                    return asdict(judged(task, args.tokens, dense, sparse, known, 0.1))  # noqa: B023

                steps.remember(f"{task} {name}|{density}", compared)
                shown(f"{task} of {name} at {density:.1%}")
    return stored_rows([args.state])


if __name__ == "__main__":
    main()
