# SPDX-License-Identifier: Apache-2.0
"""Measure what ways to choose blocks lose on long-context tasks, at equal density.

    python benchmarks/quality/tasks.py smollm2 --tokens 1024 --density 0.35 --samples 2 --json

Each method runs in every layer that sees its whole context, at one budget for all heads, except "tuned", whose budgets
come from the costs of the heads. Finished rows are stored in `--state`, so an interrupted run continues.
"""

import argparse
import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import apply, model_facts
from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.models import load_model
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.tasks.run import DenseAnswers, SuitePlan, run_suite
from dynaxx.lab.tasks.suite import named_tasks
from dynaxx.lab.texts import encode, load_text, split_text
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.costs import BUDGETS, Costs, rule_of
from dynaxx.lab.tune.sensitivity import measure_head_costs

BLOCK = 32
FORCED = dx.Sink(BLOCK) | dx.LocalBlocks(2)
UNIFORM = {
    "vertical and slash lines of the last queries (MInference)": dx.LastQueryProbe(),
    "anti-diagonals (XAttention)": dx.AntiDiagonal(),
    "bounds of keys (Quest)": dx.MinMax(),
    "mean query": dx.MeanQuery(),
}
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


def uniform_policies(model, tokens, density):
    """Yield name, policy and density of every method with one budget for all heads."""
    window = lambda x: dx.Sink(BLOCK) | dx.SlidingWindow(max(1, int(x)))
    spans = [BLOCK * n for n in range(1, tokens // BLOCK + 1)]
    static = lambda w: window(w).layout(tokens, causal=True, block_size=BLOCK).density()
    span = max((w for w in spans if static(w) <= density), default=spans[0])
    yield "window and sink", policy_of(model, [dx.Rule.of(window(span))]), static(span)
    for name, scorer in UNIFORM.items():
        make = lambda budget, scorer=scorer: FORCED | dx.TopK(float(budget), scorer)
        rule, found = at_density(model, make, tokens, density, 0.0, 1.0)
        yield name, policy_of(model, [dx.Rule.of(rule)]), found


def tuned_policy(model, ids, density):
    """Return a policy whose budgets come from the costs of the heads on a text, and its density there."""
    scorer = dx.MeanQuery()
    rule = lambda budget: rule_of(scorer, budget, BLOCK, 64, (ids.shape[1] - 1) // BLOCK // 2)
    measured = measure_head_costs(model, ids, [rule(budget) for budget in BUDGETS], block_size=BLOCK)
    plain = Costs.plain(measured)
    costs = Costs(
        tuple(plain["layers"]), {scorer: torch.tensor(plain["density"])}, {scorer: torch.tensor(plain["loss"])}
    )
    found = Allocator(costs.density[scorer], costs.loss[scorer]).at(density)
    rows = zip(costs.layers, costs.budgets(found.choice), strict=True)
    return policy_of(model, [dx.Rule.of(rule(tuple(row)), layers=[layer]) for layer, row in rows]), found.density


def run_method(model, tokenizer, policy, text, plan, dense, seed):
    """Return the rows of one method, and the mean density of its layers on the prompts."""
    seen = []

    @contextlib.contextmanager
    def applied():
        with apply(model, policy) as handle, handle.watch(lambda _, layout: seen.append(layout.density())):
            yield handle

    found = run_suite(model, tokenizer, applied, text, plan, dense=dense, seed=seed)
    return found.rows, sum(seen) / max(1, len(seen))


def flat(method, density, row):
    """Return one row of the table."""
    drop = row["drop"]
    return {
        "task": row["task"],
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
    parser.add_argument("--text", default="pydoc")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--density", type=float, default=0.35)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--state", type=Path, default=Path("benchmarks-tasks-state.json"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model, tokenizer = load_model(options.model, device=options.device)
    calibration, held_out = split_text(load_text(options.text))
    ids = encode(tokenizer, calibration, options.tokens + 1)
    names = named_tasks(tuple(options.tasks.split(",")))
    settings = {name: getattr(options, name) for name in ("tokens", "density", "samples", "seed", "text")}
    steps = Steps(options.state, fingerprint(model, ids, **settings))
    dense = DenseAnswers()
    rows = []
    with evaluating(model):
        make = lambda: tuned_policy(model, ids, options.density)
        tuned = steps.remember("tuned", lambda: [(found := make())[0].model_dump(mode="json"), found[1]])
        methods = [("tuned, last 64 queries see everything", dx.Policy.model_validate(tuned[0]), tuned[1])]
        methods += reversed([*uniform_policies(model, options.tokens, options.density)])
        for task in names:  # task by task, so that a run that is stopped has whole tasks
            plan = SuitePlan((task,), (options.tokens,), options.samples)
            for name, policy, _ in methods:
                key = f"{task} {name}"
                if key not in steps:
                    found, density = run_method(model, tokenizer, policy, held_out, plan, dense, options.seed)
                    steps.remember(key, lambda found=found, density=density: [asdict(found[0]), density])
                row, density = steps.remember(key, list)
                rows.append(flat(name, density, row))
    print(json.dumps({"rows": rows}) if options.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
