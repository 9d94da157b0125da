# SPDX-License-Identifier: Apache-2.0
"""Draw what a trace of a GPU shows of dynaxx: `python docs/_pictures/tools.py`."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
matplotlib.rcParams.update({"svg.hashsalt": "dynaxx", "svg.fonttype": "path", "font.size": 9})
import matplotlib.pyplot as plt  # noqa: E402

ASSETS = Path(__file__).parent.parent / "assets"
SHOWN = 3  # layers


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


if __name__ == "__main__":
    draw_gpu_trace(Path(__file__).with_name("gpu_trace.json"), ASSETS / "profile_gpu_trace.svg")
