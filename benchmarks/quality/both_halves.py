# SPDX-License-Identifier: Apache-2.0
"""Measure what a policy loses on both halves of each kind of text, with the errors that `tune` counts.

    python benchmarks/quality/both_halves.py smollm2 policy.json --tokens 8192 --device cuda --json

`tune` sees the calibration halves, validation the held-out halves.
"""

import argparse
import json
import math

import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import apply
from dynaxx.lab.kinds import KINDS, text_of
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import token_losses
from dynaxx.lab.texts import encode, split_text
from dynaxx.lab.tune.density.trials import mean_and_error


def changes_of(model, policy, ids, tokens):
    """Return the change of each token's loss under a policy, for each stretch of a text."""
    for start in range(0, ids.shape[1] - tokens, tokens):
        some = ids[:, start : start + tokens + 1]
        dense = token_losses(model, some)[0]
        with apply(model, policy):
            yield (token_losses(model, some)[0] - dense).double().cpu()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("policy")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--stretches", type=int, default=12, help="stretches of each half, at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, dtype=torch.float32, device=args.device)
    policy = dx.load_policy(args.policy).replace(dense_below=0, sparse_from=0)
    rows = {}
    for kind in KINDS:
        for half, part in split_text(text_of(kind))._asdict().items():
            ids = encode(tokenizer, part, args.tokens + 1, most=args.stretches * args.tokens + 1)
            mean, error = mean_and_error(list(changes_of(model.eval(), policy, ids, args.tokens)))
            rows.setdefault(half, {"half": half})[kind] = f"{math.expm1(mean):+.2%} ± {error:.2%}"
    print(json.dumps({"rows": list(rows.values())}) if args.json else "\n".join(map(str, rows.values())))


if __name__ == "__main__":
    main()
