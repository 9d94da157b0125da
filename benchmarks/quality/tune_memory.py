# SPDX-License-Identifier: Apache-2.0
"""Measure the time and peak GPU memory of tuning a model of Llama-3.1-8B's shape with random weights, bf16.

python benchmarks/quality/tune_memory.py FOLDER_OF_A_TOKENIZER --json
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.lab.texts import encode, load_text, split_text
from dynaxx.lab.tune.costs import BUDGETS, DEFAULT_SCORERS, rule_of, scorers_named
from dynaxx.lab.tune.run import TuneOptions, tune
from dynaxx.lab.tune.sensitivity import measure_head_costs

GIB = 2**30


def random_llama(layers, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--text", default="pydoc")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="time budget of tune")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="file that is rewritten after each row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer, text, gpu = from_folder(AutoTokenizer, args.tokenizer), load_text(args.text), args.device == "cuda"
    model = random_llama(args.layers, args.device)
    weights = sum(each.nbytes for each in model.parameters()) / GIB
    rows = []

    def measured(step, tokens, run):
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        run()
        if gpu:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / GIB if gpu else None
        row = {"step": step, "tokens": tokens, "seconds": time.monotonic() - began, "weights": weights, "peak": peak}
        rows.append(row)
        if args.out:
            args.out.write_text(json.dumps({"rows": rows}))
        if not args.json:
            print(row, flush=True)

    part, size = split_text(text).calibration, args.block_size
    for tokens in args.lengths:
        ids = encode(tokenizer, part, tokens + 1)
        rules = [
            rule_of(scorer, budget, size, 64, tokens // size // 2)
            for scorer in scorers_named(DEFAULT_SCORERS)
            for budget in BUDGETS
        ]
        measured("costs of all heads", tokens, lambda: measure_head_costs(model, ids, rules, block_size=size))  # noqa: B023
    with tempfile.TemporaryDirectory() as folder:
        given = dict(block_size=size, time_budget=args.seconds, reference=False, tokens=args.lengths[0])
        run = lambda: tune(model, tokenizer, text, TuneOptions("Llama-3.1-8B's shape", Path(folder), **given))
        measured(f"tune with a budget of {args.seconds:.0f} s", args.lengths[0], run)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
