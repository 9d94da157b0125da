# SPDX-License-Identifier: Apache-2.0
"""Draw what other tools show of dynaxx: a trace of a GPU, and attention between tokens in BertViz's manner.

`python docs/_pictures/tools.py`: the numbers come from a run here, of SmolLM2 on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import torch

from dynaxx.lab.analyze.capture import LayerAttention, visit_attention
from dynaxx.lab.analyze.maps import whole_map
from dynaxx.lab.models import load_model

matplotlib.use("agg")
matplotlib.rcParams.update({"svg.hashsalt": "dynaxx", "svg.fonttype": "path", "font.size": 9})
import matplotlib.pyplot as plt  # noqa: E402

ASSETS = Path(__file__).parent.parent / "assets"
SHOWN = 3  # layers
TEXT = "The cat sat on the mat because the cat was tired."
LAYER, HEADS = 5, (0, 3, 7)


def draw_gpu_trace(file: Path, path: Path) -> None:
    """Draw the NVTX ranges of a prefill on a GPU and the kernels inside them, from a trace's excerpt."""
    found = json.loads(file.read_text())
    ranges, kernels = found["gpu_ranges"], found["kernels"]
    begin = ranges[0]["ts"]
    of_attention = lambda name: any(word in name for word in ("flash", "fmha", "sdpa", "attention"))
    rows: list[list[tuple[float, float]]] = [[(each["ts"] - begin, each["dur"]) for each in ranges[:SHOWN]], [], []]
    for each in kernels:
        rows[1 if of_attention(each["name"]) else 2].append((each["ts"] - begin, each["dur"]))
    figure, ax = plt.subplots(figsize=(9, 1.9), layout="constrained")
    for place, bars in enumerate(rows):
        ax.broken_barh(bars, (place - 0.35, 0.7), color=("#3f51b5", "#ef6c00", "#90a4ae")[place])
    for each in ranges[:SHOWN]:
        middle = each["ts"] - begin + each["dur"] / 2
        ax.text(middle, -0.45, each["name"], ha="center", va="bottom", fontsize=7)
    ax.set_yticks(range(3), ["dynaxx.attention.LAYER", "attention's kernels", "other kernels"])
    ax.set_ylim(2.6, -0.9)
    ax.margins(x=0.04)
    ax.set_xlabel("microseconds")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_heads(model: Any, tokenizer: Any, path: Path) -> None:
    """Draw, for some heads, a line from each token to each token that it attends to, as dark as its weight."""
    ids = tokenizer(TEXT)["input_ids"]
    names = [tokenizer.decode([each]) for each in ids]
    maps: dict[int, torch.Tensor] = {}

    def visit(attention: LayerAttention) -> None:
        if attention.layer == LAYER:
            maps.update({head: whole_map(attention, head) for head in HEADS})

    visit_attention(model, torch.tensor([ids]), visit)
    figure, axes = plt.subplots(1, len(HEADS), figsize=(9, 3.2), layout="constrained")
    for ax, head in zip(axes, HEADS, strict=True):
        for query, row in enumerate(maps[head].tolist()):
            for key, weight in enumerate(row):
                if weight > 0.02:
                    ax.plot((0, 1), (query, key), color="#3f51b5", alpha=min(1.0, weight), linewidth=2)
        for place, name in enumerate(names):
            ax.text(-0.04, place, name, ha="right", va="center", fontsize=8)
            ax.text(1.04, place, name, ha="left", va="center", fontsize=8)
        ax.set_xlim(-0.6, 1.6)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_title(f"layer {LAYER}, head {head}", fontsize=9)
        ax.axis("off")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    loaded = load_model("smollm2")
    draw_heads(*loaded, ASSETS / "analyze_heads.svg")
    draw_gpu_trace(Path(__file__).with_name("gpu_trace.json"), ASSETS / "profile_gpu_trace.svg")
