# SPDX-License-Identifier: Apache-2.0
"""Measure scorers on a model's real attention: recall at a budget, and time.

    OMP_NUM_THREADS=1 python benchmarks/quality/scorers.py smollm2 --tokens 4096 --layers 3 12 21

Prints Markdown. Recall is of dense causal attention, over sampled queries; the oracle ranks blocks by their true mass.
"""

import argparse
import statistics
import time

import torch
from last_query_probe import LastQueryProbe

import dynaxx as dx
from dynaxx.lab.analyze.capture import visit_attention
from dynaxx.lab.models import load_model
from dynaxx.lab.texts import encode, load_text

FORCED = dx.Sink(64) | dx.LocalBlocks(1)
COLUMNS = {
    "`TopK(0.1)`": lambda scorer, per: dx.TopK(0.1, scorer, per=per),
    "`TopK(0.25)`": lambda scorer, per: dx.TopK(0.25, scorer, per=per),
    "`Sink(64) \\| LocalBlocks(1) \\| TopK(0.1)`": lambda scorer, per: FORCED | dx.TopK(0.1, scorer, per=per),
    "`Sink(64) \\| LocalBlocks(1) \\| TopK(0.25)`": lambda scorer, per: FORCED | dx.TopK(0.25, scorer, per=per),
}
SCORERS = {
    "oracle": dx.MeanPool(pool=1),  # means of one token: the map itself
    "oracle, a group together": dx.MeanPool(pool=1),
    "`MeanQuery()`, a group together": dx.MeanQuery(),
    "`MeanQuery()`": dx.MeanQuery(),
    "`MeanPool()`": dx.MeanPool(),
    "`MeanPool(16)`": dx.MeanPool(pool=16),
    "`MinMax()`": dx.MinMax(),
    "`MinMax(0.5)`": dx.MinMax(bound=0.5),
    "`MinMax(pool=16)`": dx.MinMax(pool=16),
    "`MinMax(0.75, pool=16)`": dx.MinMax(0.75, pool=16),
    "`LastQueryProbe()`": LastQueryProbe(),
    "`AntiDiagonal()`": dx.AntiDiagonal(),
}
RULES = [
    dx.TopK(0.25, dx.MinMax(0.5), per="head"),
    dx.TopP(0.9, dx.MinMax(0.5), per="head"),
    dx.Threshold(0.1, "max", dx.MinMax(0.5), per="head"),
    dx.Threshold(0.5, "uniform", dx.MinMax(0.5), per="head"),
]


def captured(name, tokens, layers):
    """Capture q and k, (1, tokens, heads, head_dim) with k once per kv head, of some layers."""
    model, tokenizer = load_model(name)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    found = []

    def keep(layer):
        if layer.layer in layers:
            found.append((layer.q[None].clone(), layer.k[None, :, ::group].clone(), layer.scale))

    visit_attention(model, encode(tokenizer, load_text("pydoc"), tokens), keep)
    return found


def measured(rule, heads, block_size, rows, repeats):
    """Return mean recall, half its interval, density and median ms over the layers, and each layer's heads."""
    results, half, density, ms, per_head = [], [], [], [], []
    for q, k, scale in heads:
        for _ in range(repeats):
            start = time.perf_counter()
            layout = dx.select_blocks(q, k, rule, block_size=block_size, scale=scale)
            ms.append(1e3 * (time.perf_counter() - start))
        found = dx.recall(q, k, layout, rows=rows, scale=scale)
        results.append(found.mean)
        per_head.append(found.per_head.flatten())
        half.append((found.high - found.low) / 2)
        density.append(layout.density())
    error = sum(each**2 for each in half) ** 0.5 / len(half)
    return statistics.mean(results), error, statistics.mean(density), statistics.median(ms), torch.cat(per_head)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12, 21])
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="timings of each selection")
    parser.add_argument("--only", default="", help="scorers with this in their names, and the oracle")
    args = parser.parse_args()
    heads = captured(args.model, args.tokens, args.layers)
    q, k, _ = (x.transpose(1, 2) if isinstance(x, torch.Tensor) else x for x in heads[0])
    start = time.perf_counter()
    torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    print(
        f"dense attention of a layer: {1e3 * (time.perf_counter() - start):.0f} ms, {torch.get_num_threads()} thread(s)"
    )
    print("\n| scorer | " + " | ".join(COLUMNS) + " | of the oracle's there: mean, worst head | ms per layer |")
    print("|---|" + "---|" * (len(COLUMNS) + 2))
    best = None
    for name, scorer in SCORERS.items():
        if best is not None and args.only not in name:
            continue
        per = "group" if "together" in name else "head"
        found = [
            measured(make(scorer, per), heads, args.block_size, args.rows, args.repeats) for make in COLUMNS.values()
        ]
        best = found[-1][4] if best is None else best
        share = found[-1][4] / best
        cells = " | ".join(f"{each[0]:.3f} ± {each[1]:.3f}" for each in found)
        print(f"| {name} | {cells} | {share.mean():.3f}, {share.min():.3f} | {found[1][3]:.0f} |", flush=True)
        density = [each[2] for each in found]
    print("\ndensities: " + ", ".join(f"{each:.3f}" for each in density))
    print("\n| rule | density | recall | ms per layer |\n|---|---|---|---|")
    for rule in RULES:
        recall, error, density, ms, _ = measured(rule, heads, args.block_size, args.rows, args.repeats)
        print(f"| `{rule!r}` | {density:.3f} | {recall:.3f} ± {error:.3f} | {ms:.0f} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
