# SPDX-License-Identifier: Apache-2.0
"""Measure how many blocks each way to choose them needs, at equal perplexity on kinds of text that tuning has not seen.

    python -m benchmarks.quality.choices smollm2 --device cuda --study tiles --out choices.json --json

Attention is computed densely and masked to the chosen blocks, so any way to choose can be compared, whether or not a
kernel exists for it. "mass" knows the true attention of every query and bounds what a scorer of blocks can reach.

For each kind of text, the budgets of the heads come from the costs of the heads on the other four kinds
(`dynaxx.lab.tune`), and the left-out kind's held-out half is evaluated. The result is the density at which the worst of
the five kinds rises by the tolerance. `--out` stores every trial, and a run with an existing file continues it.
"""

import json
from pathlib import Path

import torch
from benchmarks.quality.choices import bounds, decode, forms, heads, scored, tiles
from benchmarks.quality.choices.predict import predicted
from benchmarks.quality.choices.setting import Setting, common_arguments, stored_rows
from benchmarks.quality.choices.trials import START, costs_of, curve, mean_costs, measured, needed, trial

from dynaxx.lab.attention_route import evaluating

SHOWN = 0.24  # density at which the table shows each kind of text
STUDIES = {
    "tiles": tiles.CHOICES,
    "forms": forms.CHOICES,
    "bounds": bounds.CHOICES,
    "scored": scored.CHOICES,
    "heads": heads.CHOICES,
    "decode": decode.CHOICES,
}


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


def arguments():
    parser = common_arguments("python -m benchmarks.quality.choices", __doc__)
    parser.add_argument("--study", action="append", choices=[*STUDIES], default=None)
    parser.add_argument("--only", default="", help="names of choices that contain one of these words, by ;")
    parser.add_argument("--together", type=int, default=4, help="choices whose costs one pass measures")
    parser.add_argument("--order", type=Path, default=None, help="file with names of choices, the first ones first")
    parser.add_argument("--predict", default="", help="shares: only predict the loss at these, without any trial")
    parser.add_argument("--only-show", action="store_true", help="print the table of --out, and measure nothing")
    return parser.parse_args()


def chosen(args):
    """Return the choices to measure, by name."""
    found = {f"{study}: {name}": each for study in args.study or STUDIES for name, each in STUDIES[study].items()}
    if args.only:
        found = {name: each for name, each in found.items() if any(word in name for word in args.only.split(";"))}
    if args.order:
        first = [line for line in args.order.read_text().splitlines() if line in found]
        found = {name: found[name] for name in dict.fromkeys([*first, *found])}
    return found


def add_costs(costs, setting, several):
    """Measure the costs that several choices need and that are missing in `costs`."""
    missing = list(dict.fromkeys(measured(choice) for each in several for choice in each))
    missing = [choice for choice in missing if choice not in costs[setting.kinds[0]]]
    for kind in setting.kinds if missing else ():
        each = [costs_of(setting.model, ids, missing, seed) for seed, ids in enumerate(setting.tune_on[kind])]
        costs[kind] |= mean_costs(dict(enumerate(each)), list(range(len(each))))


def measured_rows(setting, found, args):
    """Yield the row of each choice. A choice that fails, for example by memory, is reported and skipped."""
    costs: dict = {kind: {} for kind in setting.kinds}
    names = list(found)
    for at in range(0, len(names), args.together):
        some = names[at : at + args.together]
        if setting.late():
            return
        try:
            add_costs(costs, setting, [found[name] for name in some])
        except (RuntimeError, ValueError) as error:
            setting.say(f"{some} FAILED {str(error)[:300]}")
            continue
        setting.say("costs")
        for name in some:
            if setting.late():
                return
            try:
                one = lambda density, name=name: trial(setting, found[name], costs, density, name)
                trials = curve(one, args.tolerance, START[found[name][0].decode])
            except (RuntimeError, ValueError) as error:
                setting.say(f"{name} FAILED {str(error)[:300]}")
                continue
            yield {"name": name, "needed": needed(trials, args.tolerance), "trials": trials}


def main():
    args = arguments()
    if args.only_show:
        rows = stored_rows(args.out)
        print(json.dumps({"rows": list(flat(rows))}) if args.json else "\n".join(map(str, flat(rows))))
        return
    found = chosen(args)
    setting = Setting.of(args)
    if args.predict:
        amounts = [float(each) for each in args.predict.split(",")]
        with evaluating(setting.model), torch.no_grad():
            rows = [*predicted(found, setting.model, setting.tune_on, amounts, next(iter(found)))]
        print(json.dumps({"rows": rows}) if args.json else "\n".join(map(str, rows)))
        return
    rows = stored_rows(args.out)
    found = {name: each for name, each in found.items() if name not in {row["name"] for row in rows}}
    with evaluating(setting.model), torch.no_grad():
        setting.measure_dense()
        for row in measured_rows(setting, found, args):
            rows.append(row)
            setting.store(rows)
    if args.json:
        print(json.dumps(setting.result(rows)))


if __name__ == "__main__":
    main()
