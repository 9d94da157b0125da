# SPDX-License-Identifier: Apache-2.0
"""Drawing of a layout with matplotlib: full blocks, partial blocks, and the masks inside partial blocks."""

from __future__ import annotations

from typing import Any

import torch

from dynaxx.layout.dense import layout_to_dense
from dynaxx.layout.fields import LayoutFields

FULL_COLOR = "#3f51b5"
PARTIAL_COLOR = "#9fa8da"
MAX_PAIRS = 4096 * 4096  # larger layouts are drawn by block, not by pair; 16 MB of pixels


def plot_layout(layout: LayoutFields, *, batch: int, head: int, ax: Any) -> Any:
    """Draw one head of a host layout on a matplotlib axis; `BlockLayout.plot` documents the arguments."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError("`BlockLayout.plot` needs matplotlib: pip install 'dynaxx[cli]'") from None

    if not 0 <= batch < layout.layout_batch:
        raise ValueError(f"`batch` must be from 0 to {layout.layout_batch - 1}, got {batch}")
    if not 0 <= head < layout.layout_heads:
        raise ValueError(f"`head` must be from 0 to {layout.layout_heads - 1}, got {head}")
    if ax is None:
        _, ax = plt.subplots(figsize=(5, 5), layout="constrained")

    by_pair = layout.seqlen_q * layout.seqlen_k <= MAX_PAIRS
    picture = block_picture(layout, batch, head)  # [q_blocks, kv_blocks]
    if by_pair:
        q_block, kv_block = layout.block_size
        picture = picture.repeat_interleave(q_block, 0).repeat_interleave(kv_block, 1)
        picture = picture[: layout.seqlen_q, : layout.seqlen_k]  # [seqlen_q, seqlen_k]
        visible = layout_to_dense(layout)[batch, head]
        picture = torch.where((picture == 1) & visible, 2, picture)
    extent = (0, layout.seqlen_k, layout.seqlen_q, 0)
    colors = ListedColormap(["white", PARTIAL_COLOR, FULL_COLOR])
    ax.imshow(picture.numpy(), cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
    draw_grid(layout, ax)
    ax.set_xlabel("key position")
    ax.set_ylabel("query position")
    inside = "hidden pair of a partial block" if by_pair else "partial block"
    keys = [Patch(color=FULL_COLOR, label="visible"), Patch(color=PARTIAL_COLOR, label=inside)]
    ax.legend(handles=keys, loc="upper right", fontsize="small")
    return ax


def block_picture(layout: LayoutFields, batch: int, head: int) -> torch.Tensor:
    """Return (q_blocks, kv_blocks) int64: 0 for a block that is not visited, 1 for a partial and 2 for a full block."""
    row, col, mask_ids = layout.entries()
    first = (batch * layout.layout_heads + head) * layout.q_blocks
    ours = (row >= first) & (row < first + layout.q_blocks)
    picture = torch.zeros(layout.q_blocks, layout.kv_blocks, dtype=torch.int64, device="cpu")
    picture[row[ours] - first, col[ours]] = torch.where(mask_ids[ours] >= 0, 1, 2)
    return picture


def draw_grid(layout: LayoutFields, ax: Any) -> None:
    """Draw the borders of the blocks, unless there are so many that they would hide the picture."""
    if max(layout.q_blocks, layout.kv_blocks) > 64:
        return
    q_block, kv_block = layout.block_size
    style = {"color": "#00000030", "linewidth": 0.5}
    ax.hlines(range(0, layout.seqlen_q + 1, q_block), 0, layout.seqlen_k, **style)
    ax.vlines(range(0, layout.seqlen_k + 1, kv_block), 0, layout.seqlen_q, **style)
