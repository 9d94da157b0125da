# SPDX-License-Identifier: Apache-2.0
"""Measure how long `tune` takes as a whole, and what it finds, for models of any size.

python benchmarks/quality/tune_times.py smollm2 --device cuda --kinds all --json
python benchmarks/quality/tune_times.py FOLDER --device cuda --tokens 32768 --text long.txt --json

The clock starts when the model is loaded and ends when the policy is written. Each step's end is printed.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from dynaxx.lab.models import load_model
from dynaxx.lab.texts import load_text
from dynaxx.lab.tune.run import TuneOptions, tune


class Clock:
    """Progress that prints each step with the seconds since the start."""

    def __init__(self):
        self.started = time.monotonic()

    def advance(self, steps=1, note=""):
        """Print a finished step."""
        if note and not note.startswith("layer"):
            print(f"{time.monotonic() - self.started:6.1f} s  {note}", file=sys.stderr, flush=True)

    @contextmanager
    def task(self, description, total=None):
        """Enter a part of the work."""
        self.advance(0, description)
        yield self


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", default="pydoc")
    parser.add_argument("--kinds", default="", help="kinds of text beside --text, by ','; or all")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--scorers", default="mean,bounds")
    parser.add_argument("--stretches", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None, help="time budget of tune")
    parser.add_argument("--reference", action="store_true", help="record the reference for drift too")
    parser.add_argument("--decode", action="store_true", help="search decode rules too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        options = TuneOptions(
            args.model,
            Path(folder),
            tokens=args.tokens,
            block_size=args.block_size,
            time_budget=args.seconds,
            scorers=tuple(args.scorers.split(",")),
            stretches=args.stretches,
            kinds=tuple(args.kinds.split(",")) if args.kinds else (),
            reference=args.reference,
            decode=args.decode,
        )
        found = tune(model, tokenizer, load_text(args.text), options, progress=clock)
    row = {
        "tokens": args.tokens,
        "texts": "one" if not args.kinds else f"one and {args.kinds}",
        "blocks of": args.block_size,
        "scorers": args.scorers,
        "dtype": args.dtype,
        "time budget": args.seconds,
        "seconds": round(time.monotonic() - clock.started, 1),
        "trials per head": len(found.tuned),
        "trials of one budget": len(found.uniform),
        "blocks": f"{found.chosen.density:.1%}" if found.chosen else "no density passed",
        "perplexity": f"{found.chosen.ratio - 1:+.2%}" if found.chosen else "",
        "sparse from": found.sparse_from,
    }
    print(json.dumps({"rows": [row]}) if args.json else row)


if __name__ == "__main__":
    main()
