# SPDX-License-Identifier: Apache-2.0
"""Compare one share of a cache's pages for all heads with shares by the heads' costs, at equal loss of decoded tokens.

    python benchmarks/quality/page_shares.py smollm2 --device cuda --tokens 4096 --json

The last tokens of texts are decoded one by one, as they are and as the dense model wrote them. Costs come from the
other half of each kind of text. "read" counts the first page and the window too.
"""

import argparse
import json
import math
from pathlib import Path

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.kinds import KINDS, text_of
from dynaxx.lab.models import load_model
from dynaxx.lab.texts import encode, split_text
from dynaxx.lab.tune import decode
from dynaxx.lab.tune.page_costs import measure_page_costs, shares_of

ONE, PROMPTS, BOTH = "one share", "by costs on prompts", "by costs on prompts and generated text"
TRIALS = (
    (ONE, 0.125), (BOTH, 0.0625), (ONE, 0.0625), (BOTH, 0.03125), (ONE, 0.25), (BOTH, 0.125), (PROMPTS, 0.0625),
    (BOTH, 0.015625), (ONE, 0.03125), (PROMPTS, 0.03125), (PROMPTS, 0.125), (ONE, 0.5), (BOTH, 0.25),
)  # fmt: skip


@torch.no_grad()
def with_written_ends(model, texts, steps):
    """Return (texts, tokens) whose last tokens the dense model draws, all texts together."""
    cache, ids = decode._read(model, texts[:, : -steps - 1]), texts[:, :-steps].to(model.device)
    for _ in range(steps):
        out = model.base_model(ids[:, -1:], use_cache=True, **decode.with_cache(model.base_model, cache))
        cache = decode.cache_of(out)
        drawn = torch.multinomial(decode.logits_of(model, out[0][:, -1]).softmax(-1), 1)
        ids = torch.cat([ids, drawn], 1)
    return ids.cpu()


def measured(model, tokenizer, text, args, report):
    """Measure every trial on prompts and on generated text."""
    kinds, facts, steps = args.kinds.split(","), model_facts(model), args.steps
    layers, group = list(range(facts.layers)), facts.q_heads // facts.kv_heads
    parts = {kind: split_text(text(kind)) for kind in kinds}
    held_out = [encode(tokenizer, parts[kind].held_out, 2 * args.tokens + 2) for kind in kinds]
    prompts = torch.cat([part.view(2, -1) for part in held_out])
    others = torch.cat([encode(tokenizer, parts[kind].calibration, args.tokens + 1) for kind in kinds])
    torch.manual_seed(args.seed)
    texts = {"prompts": prompts, "generated": with_written_ends(model, prompts, steps)}
    budget = decode.always_read(args.page_size)
    costs_on = lambda ids: [
        measure_page_costs(model, each[None], budget, page_size=args.page_size, steps=steps, layers=layers)
        for each in ids
    ]
    by_prompts = costs_on(others)
    costs = {PROMPTS: by_prompts, BOTH: [*by_prompts, *costs_on(with_written_ends(model, others, steps))]}
    cut = lambda ids: (decode._read(model, ids[:, : -steps - 1]), ids[:, -steps - 1 :])
    ready = {name: cut(ids) for name, ids in texts.items()}
    dense = {name: decode._decoded(model, *each, None).view(len(prompts), -1) for name, each in ready.items()}
    always = (decode.WINDOW / args.page_size + 1) * args.page_size / args.tokens
    asked = [({"one": ONE, "both": BOTH}[each.split()[0]], float(each.split()[1])) for each in args.trial]
    for way, share in asked or TRIALS:
        same = [[share] * facts.kv_heads] * facts.layers
        shares = same if way == ONE else shares_of(costs[way], share)
        rules = tuple(decode.decode_rules(shares, layers, group, args.page_size))
        policy = dx.Policy(model=facts, rules=rules)
        for name, each in ready.items():
            rise = (decode._decoded(model, *each, policy).view(len(prompts), -1) - dense[name]).double()
            by_kind = rise.view(len(kinds), -1).mean(1).expm1().tolist()
            report(
                {
                    "text": name,
                    "pages": way,
                    "share": share,
                    "read": share + always,
                    "rise": math.expm1(float(rise.mean())),
                    "error": float(rise.std() / rise.numel() ** 0.5),
                    **dict(zip(kinds, by_kind, strict=True)),
                }
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=128, help="decoded tokens at the end of each text")
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--window", type=int, default=decode.WINDOW, help="last tokens that are always read")
    parser.add_argument("--bound", type=float, default=decode.BOUND, help="bound of the summaries of pages")
    parser.add_argument("--texts", type=Path, default=None, help="folder of KIND.txt instead of the built-in texts")
    parser.add_argument("--trial", action="append", default=[], help='instead of all trials: "one 0.25", "both 0.1"')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="file that is rewritten after each row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    decode.WINDOW, decode.BOUND = args.window, args.bound
    model, tokenizer = load_model(args.model, device=args.device)
    rows = []

    def report(row):
        rows.append(row)
        if args.out:
            args.out.write_text(json.dumps({"rows": rows}))
        if not args.json:
            print(row, flush=True)

    text = lambda kind: (args.texts / f"{kind}.txt").read_text("utf-8") if args.texts else text_of(kind)
    with evaluating(model):
        measured(model, tokenizer, text, args, report)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
