# SPDX-License-Identifier: Apache-2.0
"""Measure the dense model's own noise on each kind of text: how far rounding the weights moves its perplexity.

    python benchmarks/quality/noise.py smollm2 --tokens 1024 --json

A limit on perplexity that lies below these changes asks for more than a change of dtype keeps.
"""

import argparse
import json

import torch

from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.kinds import KINDS, digest_of, label, text_of
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import perplexity, token_losses
from dynaxx.lab.texts import encode, split_text
from dynaxx.lab.validate.noise import measure_noise


def rows_of(model, tokenizer, tokens):
    """Yield one row per kind of text, on the beginning of its held-out half."""
    for kind in KINDS:
        ids = encode(tokenizer, split_text(text_of(kind)).held_out, tokens + 1)
        dense = token_losses(model, ids)[0]
        found = measure_noise(model, ids, dense, [float(dense.mean())])
        yield {
            "kind": label(kind),
            "digest": digest_of(text_of(kind)),
            "perplexity": perplexity(dense),
            "rounding": f"{found.rounding:+.2%}",
            "error": f"{found.rounding_error:.2%}",
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model)
    with evaluating(model):
        rows = list(rows_of(model, tokenizer, options.tokens))
    print(json.dumps({"rows": rows}) if options.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
