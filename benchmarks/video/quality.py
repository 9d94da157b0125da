# SPDX-License-Identifier: Apache-2.0
"""Train a small video transformer on moving shapes, and compare ways to make its attention sparse at equal density.

    python benchmarks/video/quality.py --seconds 120 --json quality.json
    python benchmarks/video/quality.py --tiny --seconds 10        # on a CPU

Every row is the PSNR of clips against the model's own dense run from the same noise, averaged over prompts and seeds
that tuning did not see. Densities are measured: visited blocks of all layers and steps. Uniform methods give all heads
one rule. "shared residuals" has no tuning either: about a block per row, refreshed at every fifth of the steps by the
rest of the density. "spatial or temporal" takes the better of both windows for each head, as Sparse VideoGen does.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import FULL, TINY, Shapes, new_model, random_prompts, train

import dynaxx as dx
from dynaxx.video import Grid, GridWindow, RadialDecay, VideoRule
from dynaxx.video.tune.costs import Space, policy_of, run_with
from dynaxx.video.tune.run import CANDIDATES
from dynaxx.video.tune.search import Search, trial

MEAN = dx.MeanPool()
UNIFORM = {"pooled top-k": MEAN, "mean-query top-k": dx.MeanQuery()}
SHARED = "shared residuals"


def fitted(make: Callable[[float], Any], grid: Grid, density: float, block: int) -> Any:
    """Return the rule of a scale from 0 to 1 whose density is nearest."""
    tried = {make(step / 100): None for step in range(1, 101)}
    densities = {
        rule: rule.on(grid).layout(grid.seqlen, causal=False, block_size=block).density(causal=False) for rule in tried
    }
    return min(densities, key=lambda rule: abs(densities[rule] - density))


def side(size: int, scale: float) -> int:
    """Return a window's size that grows from 1 to twice the grid's side."""
    return max(1, round(2 * size * scale))


def shared(density: float, steps: int) -> VideoRule:
    """Return a rule for five refreshes in a number of steps: few blocks between them, and what is left at them."""
    denser = min(1.0, (density - 0.01) * steps / 5)
    few, more = (dx.TopK(share, dx.MeanQuery(), per="head") for share in (density - denser * 5 / steps, denser))
    return VideoRule.of(few, refresh=more)


def windows(grid: Grid, density: float, block: int) -> dict[str, Any]:
    """Return rules by position of about a density."""
    f, h, w = grid.shape
    makers: dict[str, Callable[[float], Any]] = {
        "window": lambda s: GridWindow(side(f, s), side(h, s), side(w, s)),
        "radial decay": lambda s: RadialDecay(side(h, s), side(w, s)),
        "spatial": lambda s: GridWindow(frames=side(f, s)),
        "temporal": lambda s: GridWindow(height=side(h, s), width=side(w, s)),
    }
    return {name: fitted(make, grid, density, block) for name, make in makers.items()}


def better_windows(search: Search, spatial: Any, temporal: Any) -> list[VideoRule]:
    """Return rules that give each head the better of two windows, by the costs of a search over both."""
    best = search.costs.loss[:2].sum(1).argmin(0).tolist()  # (layers, heads)
    rules = []
    for layer, of_heads in enumerate(best):
        for index, rule in enumerate((spatial, temporal)):
            heads = tuple(head for head, chosen in enumerate(of_heads) if chosen == index)
            rules += [VideoRule.of(rule, layers=(layer,), heads=heads)] if heads else []
    return rules


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how far tuned policies are above the best uniform method, whose PSNR is interpolated to their density.

    "shared residuals" is not among these, because tuned policies share residuals too.
    """
    found = []
    plain = {row["method"] for row in rows} - {"tuned", SHARED}
    for tuned in (row for row in rows if row["method"] == "tuned"):
        best = -math.inf
        for method in plain:
            points = sorted((row["density"], row["psnr"]) for row in rows if row["method"] == method)
            best = max(best, float(np.interp(tuned["density"], *zip(*points, strict=True))))
        gain = tuned["psnr"] - best
        found.append({"name": "dB above the best uniform method", "workload": f"density {tuned['density']:.1%}",
                      "target": 2.0, "value": gain, "ok": gain >= 2.0})  # fmt: skip
    return found


def tuned_at(search: Search, wanted: float, density_of: Callable[[Any], float], rounds: int = 4) -> Any:
    """Return the tuned policy of a density on unseen cases, where `TopP` may visit more blocks than on seen ones."""
    budget = wanted
    for _ in range(rounds):
        policy = search.best(budget).policy
        density = density_of(policy)
        if density <= wanted * 1.02:
            break
        budget *= wanted / density
    refined = search.refined(budget).policy
    return refined if density_of(refined) <= wanted * 1.02 else policy


def main() -> None:
    """Print a row per method and density, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="time to train")
    parser.add_argument("--weights", type=Path, help="state dict of an earlier training, in place of training")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    parser.add_argument("--batch", type=int, help="clips per step of training; that of the size by default")
    parser.add_argument("--windows", action=argparse.BooleanOptionalAction, default=True, help="also rules by position")
    parser.add_argument("--tiny", action="store_true", help="a model for a test on a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size, block = (TINY, 16) if options.tiny else (FULL, 64)
    size = size._replace(batch=options.batch or size.batch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = Grid(size.frames, size.pixels // 2, size.pixels // 2)
    if options.weights:
        model, losses = new_model(size, device).eval(), []
        model.load_state_dict(torch.load(options.weights, map_location=device))
    else:
        model, losses = train(size, device, options.seconds)
    print(f"trained: {50 * len(losses)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "not trained")
    sampler = Shapes(model, size)
    generator = torch.Generator().manual_seed(7)
    at_once = 2 if options.tiny else 8
    cases = [("; ".join(random_prompts(at_once, generator)), seed) for seed in range(4)]
    seen, unseen = cases[:2], cases[2:]
    started = time.monotonic()
    search = Search(sampler, Space((*CANDIDATES, None), block_size=block), seen)
    print(f"tuned in {time.monotonic() - started:.0f} s")
    dense = [run_with(sampler, policy_of(sampler, search.space, []), case)[0] for case in unseen]
    rows: list[dict[str, Any]] = []
    document = {"rows": rows, "losses": losses, "device": device, "size": size._asdict()}

    def report(method: str, wanted: float, policy: Any) -> None:
        found = trial(sampler, policy, unseen, dense)
        rows.append({"method": method, "wanted": wanted, "density": found.density, "psnr": found.psnr,
                     "error": found.error})  # fmt: skip
        print(f"{method:20} {wanted:4.0%}: density {found.density:6.1%}, {found.psnr:6.2f} dB", flush=True)
        if options.json:
            options.json.write_text(json.dumps(document | {"bars": bars(rows)}))

    one = lambda rule: policy_of(sampler, search.space, [VideoRule.of(rule)])
    for density in options.densities:
        for method, scorer in UNIFORM.items():
            report(method, density, one(dx.TopK(density, scorer, per="head")))
        report(SHARED, density, policy_of(sampler, search.space, [shared(density, size.steps)], refresh_every=0.2))
        if options.windows:
            found = windows(grid, density, block)
            spatial, temporal = found.pop("spatial"), found.pop("temporal")
            for method, rule in found.items():
                report(method, density, one(rule))
            both = Search(sampler, Space((spatial, temporal, None), block_size=block, groups=1, every=()), seen[:1])
            rules = better_windows(both, spatial, temporal)
            report("spatial or temporal", density, policy_of(sampler, both.space, rules))
        equal = next(row["density"] for row in reversed(rows) if row["method"] == "pooled top-k")
        policy = tuned_at(search, equal, lambda policy: trial(sampler, policy, unseen, dense).density)
        report("tuned", density, policy)


if __name__ == "__main__":
    main()
