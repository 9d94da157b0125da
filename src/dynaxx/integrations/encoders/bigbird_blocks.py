# SPDX-License-Identifier: Apache-2.0
"""The blocks that BigBird attends to, and how often it visits each.

The model's own code draws the random blocks of a layer. Outside training it draws none: every random slot holds block
0, so the first block is visited 1 + `num_random_blocks` times, and the weight of its keys in the softmax rises by that
factor. In training a random block may coincide with a block of the window or with the last block, which is then visited
twice. Both effects are part of the result of transformers and are kept: a block visited m times counts m times.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynaxx.layout import BLOCK_SIZES, FULL, BlockGrid, BlockLayout, ElementMasks
from dynaxx.lazy import lazy


def layout_block(block_size: int) -> int | None:
    """Return the largest block size of a layout that divides the model's block size, or None."""
    return max((size for size in BLOCK_SIZES if block_size % size == 0), default=None)


class Visits:
    """The number of visits of each block of queries to each block of keys, and the layouts for them.

    Args:
        drawn: (heads, blocks - 2, slots) int64, the random blocks of every block of queries except the first and last.
        block_size: tokens per block of the model.
        device: the device of the layouts.

    Attributes:
        counts: (heads | 1, blocks, blocks) int64.
    """

    def __init__(self, drawn: Tensor, block_size: int, device: torch.device) -> None:
        """Count the visits."""
        if bool((drawn == drawn[:1]).all()):
            drawn = drawn[:1]
        heads, blocks = drawn.shape[0], drawn.shape[1] + 2
        counts = torch.zeros(heads, blocks, blocks, dtype=torch.int64, device="cpu")
        middle = torch.arange(1, blocks - 1, device="cpu")
        for shift in (-1, 0, 1):
            counts[:, middle, middle + shift] = 1
        counts[:, :, (0, -1)] = 1
        counts[:, (0, -1)] = 1
        counts[:, 1:-1].scatter_add_(2, drawn, torch.ones_like(drawn))
        self.counts = counts
        self._block_size = block_size
        self._device = device

    @lazy
    def by_count(self) -> list[tuple[int, BlockLayout]]:
        """Return, for each count m that occurs, m and the layout of the blocks visited m times."""
        return [(m, self._layout(self.counts == m)) for m in self.counts.unique().tolist() if m]

    def _layout(self, visited: Tensor) -> BlockLayout:
        """Return the layout of (heads, q blocks, kv blocks) bool. A block of the model may be several of the layout."""
        size = layout_block(self._block_size)
        assert size is not None, "refused before"
        scale = self._block_size // size
        fine = visited.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
        head, row, col = fine.nonzero(as_tuple=True)
        heads, rows, cols = fine.shape
        grid = BlockGrid(rows * size, cols * size, (size, size), causal=False)
        mask_ids = torch.full_like(col, FULL)
        masks = ElementMasks.empty(grid.block_size)
        layout = BlockLayout.from_entries(grid, head * rows + row, col, mask_ids, masks, layout_heads=heads)
        return layout.to(self._device)


@lru_cache(maxsize=64)
def visits_of(drawn: bytes, shape: tuple[int, ...], block_size: int, device: torch.device) -> Visits:
    """Return the visits for some drawn blocks. Layers that drew the same blocks share the object."""
    blocks = (
        torch.frombuffer(bytearray(drawn), dtype=torch.int64)
        if drawn
        else torch.zeros(0, dtype=torch.int64, device="cpu")
    )
    return Visits(blocks.view(shape), block_size, device)


class _Drawn(Exception):
    """Carry the random blocks out of the model's code."""


def draw_random_blocks(module: Any, seqlen: int) -> Tensor:
    """Return the random blocks of `module`, (heads, blocks - 2, slots) int64, drawn by its own code.

    That code seeds numpy's global generator in training and draws in the middle of attention. This function runs it on
    a substitute object with the module's settings, which stops it as soon as the blocks are drawn, and restores the
    generator.
    """

    def leave(_from: Any, _to: Any, rand_attn: Tensor, *_: Any) -> None:
        raise _Drawn(rand_attn[0])

    kind: Any = type(module)
    stand_in = kind.__new__(kind)
    stand_in.__dict__.update(module.__dict__)
    stand_in.__dict__["_create_rand_mask_from_inputs"] = leave
    state = np.random.get_state()
    try:
        stand_in.bigbird_block_sparse_attention(
            query_layer=torch.empty(0, dtype=torch.float32, device="cpu"),
            key_layer=None,
            value_layer=None,
            band_mask=None,
            from_mask=None,
            to_mask=None,
            from_blocked_mask=None,
            to_blocked_mask=None,
            n_heads=module.num_attention_heads,
            n_rand_blocks=module.num_random_blocks,
            attention_head_size=module.attention_head_size,
            from_block_size=module.block_size,
            to_block_size=module.block_size,
            batch_size=1,
            from_seq_len=seqlen,
            to_seq_len=seqlen,
            seed=module.seed,
            plan_from_length=None,
            plan_num_rand_blocks=None,
        )
    except _Drawn as drawn:
        found: Tensor = drawn.args[0]
        return found
    finally:
        np.random.set_state(state)
    raise RuntimeError(f"{type(module).__name__} drew no random blocks; this version of transformers is not supported")
