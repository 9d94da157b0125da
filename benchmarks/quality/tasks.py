# SPDX-License-Identifier: Apache-2.0
"""Measure what ways to choose blocks lose on long-context tasks, at equal density.

    python benchmarks/quality/tasks.py smollm2 --tokens 1024 --density 0.35 --samples 2 --json

Each method runs in every layer that sees its whole context, at one budget for all heads, except three whose budgets
come from the costs of the heads: "tuned" by their mean over the texts, "even" so that the text that rises most rises
least, "tasks" by texts and other samples of the tasks. With
several `--scorers`, each head takes the one that loses least. `--policy` adds policies from files.
Texts and prompts start as the tokenizer starts them (Gemma: <bos>). Layers with a window keep the model's own
attention. Finished rows are stored in
`--state`, so an interrupted run continues; several processes share the tasks with a state each, and `--show` prints
the rows of all.
"""

import argparse
import json
import math
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
from task_policies import (
    BY_COSTS,
    LEFT_OUT,
    METHODS,
    block_size,
    left_out_rises,
    methods_of,
    rises_per_loss,
    text_costs,
)
from task_scores import dense_losses, perplexity_rise, scored, shown
from task_tables import by_text, side_by_side, stored_rows

import dynaxx as dx
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import evaluating
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.result import judged
from dynaxx.lab.tasks.score import closed_book
from dynaxx.lab.tasks.suite import make_task, named_tasks
from dynaxx.lab.texts import encode, load_text, split_text, started
from dynaxx.lab.tune.costs import LOCAL_TOKENS

COST_TASKS = "niah_multikey_1,niah_multivalue,vt,cwe,qa_1"
TASKS = "niah_single_2,niah_multikey_1,niah_multivalue,vt,cwe"


def stretches(tokenizer, text, tokens, count):
    """Return consecutive stretches of a text, each (1, tokens + 1), with the tokenizer's start."""
    ids = encode(tokenizer, text, count * tokens + 1)
    return [started(tokenizer, ids[:, i * tokens : (i + 1) * tokens + 1]) for i in range(count)]


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
    parser.add_argument("--samples", type=int, default=2, help="of each task, at least 2: a single one has no interval")
    parser.add_argument("--task-weight", type=float, default=0.3, help="of costs of tasks beside those of texts")
    parser.add_argument("--scorers", default="mean", help="mean, 'tile N', 'anti N', bounds; several: best by head")
    parser.add_argument("--fine", action="store_true", help="more budgets to choose from, and smaller ones")
    parser.add_argument("--floor", type=float, default=0.5, help="rows of fewer tokens than this share count as it")
    parser.add_argument("--local", type=int, default=LOCAL_TOKENS, help="tokens before each row that are always seen")
    parser.add_argument("--last", type=int, default=64, help="last queries that see everything")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=FILE", help="a further method")
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
    parser.add_argument("--own-kernels", action="store_true", help="dense attention and windows on dynaxx's kernels")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.samples < 2:
        parser.error("--samples must be at least 2: a single sample has no interval")
    rows = stored_rows(args.show) if args.show else measured_rows(args)
    if args.side_by_side:
        rows = side_by_side(rows, args.density)
    elif args.only_policies:
        rows = by_text(rows, args.text or ["pydoc"])
    print(json.dumps({"rows": rows}) if args.json else "\n".join(map(str, rows)))


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
        *("task_weight", "scorers", "fine", "floor", "local", "last", "own_kernels"),
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
        score = partial(scored, model, own_kernels=args.own_kernels)
        tasks = () if args.only_policies else named_tasks(tuple(args.tasks.split(",")))
        for task in tasks:  # a run that is stopped has whole tasks
            make = lambda index: make_task(task, tokenizer, haystack, args.tokens, seed=args.seed, index=index)  # noqa: B023
            samples = [make(index) for index in range(args.samples)]
            dense = steps.remember(f"dense {task}", lambda: score(samples, others=True))  # noqa: B023
            known = steps.remember(f"known {task}", lambda: [closed_book(model, each) for each in samples])  # noqa: B023
            others = [None if gap is None else logprob - gap for logprob, _, gap in dense]
            shown(f"{task} dense")
            for name, policy, density in policies:

                def compared(policy=policy):
                    sparse = score(samples, policy)  # noqa: B023
                    before = [each[:2] for each in dense]  # noqa: B023
                    return asdict(judged(task, args.tokens, before, sparse, known, 0.1, others=others))  # noqa: B023

                steps.remember(f"{task} {name}|{density}", compared)
                shown(f"{task} of {name} at {density:.1%}")
    return stored_rows([args.state])


if __name__ == "__main__":
    main()
