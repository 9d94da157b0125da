# SPDX-License-Identifier: Apache-2.0
"""Draw a grid, its order and its blocks for the guide on video: `python docs/_pictures/video.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

from dynaxx.video import Grid, GridWindow

matplotlib.use("agg")
matplotlib.rcParams.update({"svg.hashsalt": "dynaxx", "svg.fonttype": "path", "font.size": 9})
import matplotlib.pyplot as plt  # noqa: E402

BLOCK = 16
SHOWN = 2  # frames


def draw_frames(axes: list[plt.Axes], grid: Grid) -> None:
    """Draw the first frames with a colour and a number per block."""
    place = grid.inverse().numpy().reshape(grid.shape)
    block = place // BLOCK
    colours = matplotlib.colormaps["tab20"]
    for frame, ax in enumerate(axes):
        ax.imshow(colours(block[frame] % 20), alpha=0.55)
        for (y, x), number in np.ndenumerate(place[frame]):
            ax.text(x, y, number, ha="center", va="center", fontsize=5)
        ax.set(xticks=[], yticks=[], title=f"frame {frame}")


def main() -> None:
    """Write docs/assets/video.svg."""
    grid, larger = Grid(6, 7, 8), Grid(12, 12, 16, text=20)
    figure = plt.figure(figsize=(9, 2.9), layout="constrained")
    parts = figure.add_gridspec(1, SHOWN + 1, width_ratios=[1] * SHOWN + [1.05])
    draw_frames([figure.add_subplot(parts[0, at]) for at in range(SHOWN)], grid)
    rule = GridWindow(3, 5, 5)
    layout = rule.on(larger).layout(larger.seqlen, causal=False, block_size=32)
    ax = figure.add_subplot(parts[0, SHOWN])
    layout.plot(ax=ax)
    ax.get_legend().remove()
    ax.set_title(f"{rule!r}\n12 x 12 x 16 tokens and text: {layout.density(causal=False):.0%}", fontsize=8)
    path = Path(__file__).parent.parent / "assets" / "video.svg"
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
