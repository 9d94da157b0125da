# SPDX-License-Identifier: Apache-2.0
"""The model and the texts of a study, and the file that stores its rows."""

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dynaxx.lab.kinds import KINDS, text_of
from dynaxx.lab.models import load_model
from dynaxx.lab.perplexity import token_losses
from dynaxx.lab.texts import encode, split_text, started


def common_arguments(command, description):
    """Return a parser of the arguments that every study has."""
    parser = argparse.ArgumentParser(
        prog=command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cost-tokens", type=int, default=None, help="length of the texts for costs, default --tokens")
    parser.add_argument("--stretches", type=int, default=2, help="held-out stretches of each kind")
    parser.add_argument("--cost-stretches", type=int, default=1, help="stretches of each kind for costs")
    parser.add_argument("--texts", type=Path, default=None, help="folder of KIND.txt instead of the built-in texts")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing new after this time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=Path, default=None, help="file for the rows; a run with an existing one continues"
    )
    parser.add_argument("--json", action="store_true")
    return parser


@dataclass
class Setting:
    """A model, texts of several kinds to measure costs on, and held-out texts of the same kinds."""

    model: Any
    kinds: list[str]
    texts: dict[str, list[torch.Tensor]]  # held out, each (1, tokens + 1)
    tune_on: dict[str, list[torch.Tensor]]
    args: argparse.Namespace
    started: float
    dense: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # losses of `texts`

    @classmethod
    def of(cls, args):
        """Load the model and the texts."""
        torch.backends.cuda.matmul.allow_tf32 = False
        started = time.monotonic()
        model, tokenizer = load_model(args.model, device=args.device)
        kinds = args.kinds.split(",")
        text = lambda kind: (args.texts / f"{kind}.txt").read_text("utf-8") if args.texts else text_of(kind)
        parts = {kind: split_text(text(kind)) for kind in kinds}
        texts = {kind: stretches(tokenizer, parts[kind].held_out, args.tokens, args.stretches) for kind in kinds}
        length = args.cost_tokens or args.tokens
        tune_on = {kind: stretches(tokenizer, parts[kind].calibration, length, args.cost_stretches) for kind in kinds}
        return cls(model, kinds, texts, tune_on, args, started)

    def measure_dense(self):
        """Measure the dense losses of the held-out texts."""
        self.dense = {kind: [token_losses(self.model, ids)[0] for ids in each] for kind, each in self.texts.items()}
        self.say(f"dense perplexity {self.perplexity()}")

    def perplexity(self):
        """Return the dense perplexity of each kind."""
        return {kind: math.exp(float(torch.cat(each).mean())) for kind, each in self.dense.items()}

    def say(self, what):
        """Print a finished step and the seconds since the start."""
        print(f"{what} after {time.monotonic() - self.started:.1f} s", flush=True)

    def late(self):
        """Return whether the time for new work is over."""
        return time.monotonic() - self.started > self.args.seconds

    def result(self, rows):
        """Return the rows and what they were measured on as JSON data."""
        return {"tokens": self.args.tokens, "dense": self.perplexity(), "rows": rows}

    def store(self, rows):
        """Report the newest row, and store all in `--out`."""
        self.say(f"{rows[-1]['name']}: {rows[-1]['needed']}")
        if self.args.out:
            self.args.out.write_text(json.dumps(self.result(rows)), encoding="utf-8")


def stored_rows(path):
    """Return the rows of a file, or none if there is no file."""
    rows = json.loads(path.read_text("utf-8"))["rows"] if path and path.exists() else []
    return [row for row in rows if "trials" in row]


def stretches(tokenizer, text, tokens, count):
    """Return consecutive stretches of a text, each (1, tokens + 1)."""
    ids = encode(tokenizer, text, count * tokens + 1)
    return [started(tokenizer, ids[:, i * tokens : (i + 1) * tokens + 1]) for i in range(count)]
