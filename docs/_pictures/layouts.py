# SPDX-License-Identifier: Apache-2.0
"""Draw the layouts that the README and the concepts page show: `python docs/_pictures/layouts.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

import dynaxx as dx

matplotlib.use("agg")
matplotlib.rcParams.update({"svg.hashsalt": "dynaxx", "svg.fonttype": "path", "font.size": 9})
import matplotlib.pyplot as plt  # noqa: E402

ASSETS = Path(__file__).parent.parent / "assets"


def clustered_qkv(seqlen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k (1, seqlen, 1, 32) whose topics come and go, so that far blocks matter to some queries."""
    generator = torch.Generator().manual_seed(3)
    topics = 2 * torch.randn(6, 32, generator=generator)
    topic = torch.randint(0, 6, (seqlen // 64,), generator=generator).repeat_interleave(64)
    q, k = (topics[topic] + torch.randn(seqlen, 32, generator=generator) for _ in range(2))
    return q[None, :, None], k[None, :, None]


def draw(path: Path, layouts: dict[str, dx.BlockLayout]) -> None:
    """Draw layouts side by side, each under the rule that made it."""
    figure, axes = plt.subplots(1, len(layouts), figsize=(3.4 * len(layouts), 3.7), layout="constrained", squeeze=False)
    for ax, (rule, layout) in zip(axes[0], layouts.items(), strict=True):
        layout.plot(ax=ax)
        ax.set_title(f"{rule}\ndensity {layout.density():.0%}", fontsize=9, family="monospace")
        ax.set_xticks(range(0, layout.seqlen_k + 1, 256))
        ax.set_yticks(range(0, layout.seqlen_q + 1, 256))
    for ax in axes[0][1:]:
        ax.get_legend().remove()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Write the pictures into docs/assets."""
    seqlen = 1024
    q, k = clustered_qkv(seqlen)
    pattern = dx.SlidingWindow(200) | dx.GlobalTokens(32)
    documents = dx.Documents((0, 330, 700, 1024)) & dx.Causal()
    layouts = {
        "SlidingWindow(200)\n| GlobalTokens(32)": pattern.layout(seqlen, block_size=64),
        "SlidingWindow(128)\n| TopK(0.15)": dx.select_blocks(
            q, k, dx.SlidingWindow(128) | dx.TopK(0.15), block_size=64
        ),
        "Documents((0, 330, 700, 1024))\n& Causal()": documents.layout(seqlen, block_size=64),
    }
    draw(ASSETS / "layouts.svg", layouts)
    draw(ASSETS / "layout.svg", {"SlidingWindow(200)\n| GlobalTokens(32)": pattern.layout(seqlen, block_size=64)})


if __name__ == "__main__":
    main()
