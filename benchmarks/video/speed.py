# SPDX-License-Identifier: Apache-2.0
"""Time attention over the tokens of videos on a GPU beside dense attention, and whole transformers of diffusers.

    python benchmarks/video/speed.py --json speed.json          # --no-models without diffusers

A layer's time is that of bringing q, k and v into the grid's order, choosing blocks, attending, and bringing the output
back; "shared" is the mean of five steps that share residuals at the same density. Attention at full density is first
compared with dense attention; a wrong result gives no figures. Numbers are medians in milliseconds, q, k and v random
in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dynaxx as dx
from dynaxx.lab.machine import need_gpu
from dynaxx.policy import LayerPlan
from dynaxx.policy.resolve import plan_of
from dynaxx.video import Grid, GridWindow, VideoPolicy, VideoRule, apply, grid_attention, model_facts
from dynaxx.video.attention import bound_plan
from dynaxx.video.residuals import Residuals

BLOCK = 128
LAYERS = {  # frames, rows, columns in tokens; heads of 128
    "Wan 2.1 14B, 81 frames of 720p": (Grid(21, 45, 80), 40),
    "Wan 2.1 1.3B, 81 frames of 480p": (Grid(21, 30, 52), 12),
    "HunyuanVideo, 129 frames of 720p": (Grid(33, 45, 80, text=256), 24),
}


def milliseconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median time of a call after two others."""
    times = []
    for repeat in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if repeat > 1:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def qkv(seqlen: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v, (1, seqlen, heads, 128)."""
    draw = lambda: torch.randn(1, seqlen, heads, 128, device="cuda", dtype=torch.bfloat16)
    return draw(), draw(), draw()


def dense(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    """Return torch's dense attention by a backend."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def rule_of(share: float) -> Any:
    """Return pooled top-k of a share of the blocks."""
    return dx.TopK(share, dx.MeanPool(), per="head")


def check() -> None:
    """Compare full density with dense attention on an odd grid."""
    grid = Grid(5, 21, 33, text=77, text_first=True)
    q, k, v = qkv(grid.seqlen, 4)
    found = grid_attention(q, k, v, grid, rule_of(1.0), block_size=BLOCK).float()
    exact = dense(q.float(), k.float(), v.float(), SDPBackend.MATH)
    rounding = (dense(q, k, v, SDPBackend.CUDNN_ATTENTION).float() - exact).norm()
    assert (found - exact).norm() < 2 * rounding, "full density must equal dense attention"


def layer_rows(name: str, grid: Grid, heads: int, shares: list[float]) -> list[dict[str, Any]]:
    """Time a layer of a model at each share of blocks, and with a window."""
    q, k, v = qkv(grid.seqlen, heads)
    ordered = [grid.ordered(x) for x in (q, k, v)]
    beside = {
        "cudnn_ms": milliseconds(lambda: dense(q, k, v, SDPBackend.CUDNN_ATTENTION), 3),
        "flash2_ms": milliseconds(lambda: dense(q, k, v, SDPBackend.FLASH_ATTENTION), 3),
    }
    rows = []
    for rule in [*map(rule_of, shares), GridWindow(9, 13, 13)]:
        plan = bound_plan(plan_of([rule] * heads, heads, (BLOCK, BLOCK), causal=False), grid)
        rows.append(layer_row(name, (q, k, v), ordered, grid, rule, plan) | beside)
        if isinstance(rule, dx.TopK):
            rows[-1]["shared_ms"] = shared_ms((q, k, v), grid, rule.budget)
        show(rows[-1])
    return rows


def layer_row(name: str, given: Any, ordered: Any, grid: Grid, rule: Any, plan: LayerPlan) -> dict[str, Any]:
    """Time a layer's parts and the whole, for q, k and v in the model's order and in the grid's."""
    layout = plan.layout(*ordered[:2])
    parts = {
        "order": lambda: [grid.ordered(x) for x in given],
        "choose": lambda: plan.layout(*ordered[:2]),
        "attend": lambda: dx.sparse_attention(*ordered, layout),
        "restore": lambda: grid.restored(given[0]),
        "whole": lambda: grid_attention(*given, grid, rule, block_size=BLOCK),
    }
    about = {"layer": name, "rule": repr(rule), "tokens": grid.seqlen, "heads": given[0].shape[2]}
    return (
        about | {"density": layout.density(causal=False)} | {f"{n}_ms": milliseconds(run) for n, run in parts.items()}
    )


def shared_ms(given: Any, grid: Grid, share: float) -> float:
    """Return the mean time of five steps that share residuals at a density: a refresh, and four with few blocks."""
    heads, few = given[0].shape[2], 0.01
    plans = [plan_of([rule_of(each)] * heads, heads, (BLOCK, BLOCK), causal=False) for each in (few, 5 * (share - few))]
    kept = Residuals()

    def five_steps() -> None:
        for index in range(5):
            kept.attend(*given, grid, *plans, step=(index, 10), period=(0.0, 0))

    return milliseconds(five_steps, 3) / 5


def show(row: dict[str, Any]) -> None:
    """Print a row, with its speed beside cuDNN's dense attention."""
    parts = ", ".join(f"{name[:-3]} {value:.2f}" for name, value in row.items() if name.endswith("_ms"))
    print(
        f"{row['layer']}: density {row['density']:.1%}: {row['cudnn_ms'] / row['whole_ms']:.2f}x ({parts})", flush=True
    )


def model_rows(share: float) -> list[dict[str, Any]]:
    """Time forward passes of Wan's shapes with random weights, dense and at a share of the blocks."""
    import diffusers

    sizes = {  # heads, width of the feed-forward network, layers that are timed, and latents
        "Wan 2.1 1.3B, 30 of 30 layers, 480p": (12, 8960, 30, (21, 60, 104)),
        "Wan 2.1 14B, 4 of 40 layers, 720p": (40, 13824, 4, (21, 90, 160)),
    }
    rows = []
    for name, (heads, width, layers, latents) in sizes.items():
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            model = diffusers.WanTransformer3DModel(
                num_attention_heads=heads, attention_head_dim=128, ffn_dim=width, num_layers=layers
            ).eval()
            torch.set_default_dtype(torch.float32)
        inputs = {
            "hidden_states": torch.randn(1, 16, *latents, device="cuda", dtype=torch.bfloat16),
            "timestep": torch.full((1,), 500, device="cuda"),
            "encoder_hidden_states": torch.randn(1, 512, 4096, device="cuda", dtype=torch.bfloat16),
            "return_dict": False,
        }
        run = torch.no_grad()(lambda model=model, inputs=inputs: model(**inputs)[0])
        model.set_attention_backend("_native_cudnn")
        plain = milliseconds(run, 3)
        policy = VideoPolicy(model=model_facts(model), block_size=BLOCK, rules=(VideoRule.of(rule_of(share)),))
        with apply(model, policy) as handle:
            sparse = milliseconds(run, 3)
            density = handle.density()
        rows.append({"layer": name, "density": density, "cudnn_ms": plain, "whole_ms": sparse})
        show(rows[-1])
        model.set_attention_backend("native")
        del model, run
        torch.cuda.empty_cache()
    return rows


def bars(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what was asked of the rows of Wan, and what was measured."""
    asked = {("Wan 2.1 14B, 81", 0.1): 6.5, ("Wan 2.1 14B, 81", 0.2): 3.8, ("Wan 2.1 1.3B, 30", 0.15): 1.9,
             ("Wan 2.1 14B, 4", 0.15): 2.2}  # fmt: skip
    for (layer, share), target in asked.items():
        for row in rows:
            if (
                row["layer"].startswith(layer)
                and abs(row["density"] - share) < 0.01
                and "Window" not in row.get("rule", "")
            ):
                speed = row["cudnn_ms"] / row["whole_ms"]
                name = {"name": "speed beside dense cuDNN", "workload": f"{row['layer']}, {share:.0%}"}
                yield name | {"target": target, "value": speed, "ok": speed >= target}
                if "choose_ms" in row:
                    part = row["choose_ms"] / row["whole_ms"]
                    name = {"name": "share of choosing", "workload": f"{row['layer']}, {share:.0%}"}
                    yield name | {"target": 0.05, "value": part, "ok": part <= 0.05}


def main() -> None:
    """Print the rows, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--model-share", type=float, default=0.15)
    parser.add_argument("--models", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    need_gpu()
    check()
    rows = [row for name, layer in LAYERS.items() for row in layer_rows(name, *layer, options.shares)]
    rows += model_rows(options.model_share) if options.models else []
    if options.json:
        document = {"rows": rows, "bars": list(bars(rows)), "gpu": torch.cuda.get_device_name()}
        options.json.write_text(json.dumps(document))


if __name__ == "__main__":
    main()
