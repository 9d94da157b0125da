# SPDX-License-Identifier: Apache-2.0
"""Pieces of blocks: the blocks of packed sequences, cut at the grid of the packed batch, and their joint masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.dense import unique_masks
from dynaxx.layout.masks import EMPTY, FULL, ElementMasks

PIECES_AT_ONCE = 256  # pieces that one step combines; bounds temporary memory


@dataclass(frozen=True)
class Pieces:
    """n rectangular pieces of visited blocks, each inside one packed block. Tensors are (n,) int64."""

    block_size: tuple[int, int]
    target: Tensor  # packed block of the piece: (head * q_blocks + row) * kv_blocks + col
    mask_id: Tensor  # index into the table of masks, or FULL
    shift_q: Tensor  # first query of the source block minus first query of the target block, in tokens
    shift_k: Tensor  # first key of the source block minus first key of the target block, in tokens
    rows: Tensor  # queries of the source block that lie in its sequence
    cols: Tensor  # keys of the source block that lie in its sequence

    def area(self) -> Tensor:
        """Return how many pairs of the source block lie in the target block."""
        q_block, kv_block = self.block_size
        height = (self.shift_q + self.rows).clamp(max=q_block) - self.shift_q.clamp(min=0)
        width = (self.shift_k + self.cols).clamp(max=kv_block) - self.shift_k.clamp(min=0)
        return height.clamp(min=0) * width.clamp(min=0)

    def take(self, kept: Tensor) -> Pieces:
        """Return the pieces at the given indices, or where a mask is True."""
        names = ("target", "mask_id", "shift_q", "shift_k", "rows", "cols")
        return Pieces(self.block_size, **{name: getattr(self, name)[kept] for name in names})


def cut(
    present: list[tuple[int, BlockLayout]], starts_q: tuple[int, ...], starts_k: tuple[int, ...]
) -> tuple[Pieces, ElementMasks]:
    """Cut the blocks of every sequence at the packed grid; return the pieces and the mask table for their ids."""
    first = present[0][1]
    (q_block, kv_block), device = first.block_size, first.device
    sequences: dict[int, list[int]] = {}  # those of equal length share a layout
    for s, layout in present:
        sequences.setdefault(id(layout), []).append(s)
    layouts = {id(layout): layout for _, layout in present}
    masks, columns = ElementMasks.empty(first.block_size, device), []
    for key, layout in layouts.items():
        flat_rows, cols, mask_ids = layout.entries()
        row, head = flat_rows % max(1, layout.q_blocks) * q_block, flat_rows // max(1, layout.q_blocks)
        col = cols * kv_block
        mask_ids = torch.where(mask_ids == FULL, FULL, mask_ids + len(masks))
        masks = masks.append(layout.masks)
        rows, width = (layout.seqlen_q - row).clamp(max=q_block), (layout.seqlen_k - col).clamp(max=kv_block)
        at_q, at_k = (
            torch.tensor([starts[s] for s in sequences[key]], dtype=torch.int64, device=device)[:, None]
            for starts in (starts_q, starts_k)
        )
        numbers = torch.broadcast_tensors(head, row + at_q, col + at_k, mask_ids, rows, width)
        columns.append(torch.stack([x.flatten() for x in numbers]))
    head, at_q, at_k, mask_ids, rows, width = torch.cat(columns, dim=1)
    q_blocks, kv_blocks = -(-starts_q[-1] // q_block), -(-starts_k[-1] // kv_block)
    found = []
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        row, col = at_q // q_block + down, at_k // kv_block + right
        target = (head * q_blocks + row) * kv_blocks + col
        found.append(torch.stack([target, mask_ids, at_q - row * q_block, at_k - col * kv_block, rows, width]))
    pieces = Pieces(first.block_size, *torch.cat(found, dim=1))
    return pieces.take(pieces.area() > 0), masks


def union_masks(
    pieces: Pieces, which: Tensor, partial: Tensor, table: ElementMasks, block_size: tuple[int, int]
) -> tuple[ElementMasks, Tensor]:
    """Build each distinct mask of partial packed blocks once.

    Args:
        pieces: the pieces of all packed blocks.
        which: packed block of each piece.
        partial: whether each packed block is partial.
        table: the masks of the source blocks.
        block_size: (q_block, kv_block).

    Returns:
        The mask table, and the mask id of each partial block.
    """
    kept = partial[which]
    pieces, which = pieces.take(kept), (partial.cumsum(0) - 1)[which[kept]]
    kind = _kinds(pieces, which, int(partial.sum()))
    kinds = int(kind.amax()) + 1 if kind.numel() else 0
    examples = torch.full((kinds,), kind.numel(), device=kind.device, dtype=torch.int64)  # the first block of each kind
    examples.scatter_reduce_(0, kind, torch.arange(kind.numel(), device=kind.device), "amin")
    kind_of_example = torch.full_like(kind, -1)
    kind_of_example[examples] = torch.arange(kinds, device=kind.device)
    needed = kind_of_example[which] >= 0
    tiles = _drawn_masks(pieces.take(needed), kind_of_example[which[needed]], kinds, table, block_size)
    all_set, none_set = tiles.flatten(1).all(1), ~tiles.flatten(1).any(1)
    mask_ids = torch.where(all_set, FULL, EMPTY)
    masks, mask_ids[~all_set & ~none_set] = unique_masks(ElementMasks.from_dense(tiles[~all_set & ~none_set]))
    return masks, mask_ids[kind]


def _drawn_masks(pieces: Pieces, which: Tensor, count: int, table: ElementMasks, block_size: tuple[int, int]) -> Tensor:
    """Return (count, q_block, kv_block) bool, the union of what pieces show. `which` is the mask of each piece."""
    order = which.argsort(stable=True)
    pieces, which = pieces.take(order), which[order]
    tiles = torch.zeros(count, *block_size, dtype=torch.bool, device=which.device)
    sources = torch.cat([table.to_dense(), tiles.new_ones(1, *block_size)])  # id FULL = -1 indexes the last entry
    r, c = (torch.arange(size, device=which.device) for size in block_size)
    for some in torch.arange(len(which), device=which.device).split(PIECES_AT_ONCE):
        row, col = r - pieces.shift_q[some, None], c - pieces.shift_k[some, None]
        in_row, in_col = (row >= 0) & (row < pieces.rows[some, None]), (col >= 0) & (col < pieces.cols[some, None])
        row, col = row.clamp(0, block_size[0] - 1), col.clamp(0, block_size[1] - 1)
        seen = sources[pieces.mask_id[some, None, None], row[:, :, None], col[:, None, :]]
        seen = seen & in_row[:, :, None] & in_col[:, None, :]
        tiles.index_put_((which[some],), seen, accumulate=True)
    return tiles


def _kinds(pieces: Pieces, which: Tensor, num_targets: int) -> Tensor:
    """Return (num_targets,) int64, equal for two targets only if their pieces are. `which` is each piece's target."""
    q_block, kv_block = pieces.block_size
    key = pieces.mask_id + 1
    for value, span in (
        (pieces.shift_q, 2 * q_block),
        (pieces.shift_k, 2 * kv_block),
        (pieces.rows, q_block + 1),
        (pieces.cols, kv_block + 1),
    ):
        key = key * span + (value + span // 2 if span % 2 == 0 else value)
    piece = key.unique(return_inverse=True)[1] + 1
    order = (which * (len(piece) + 1) + piece).argsort()
    which, piece = which[order], piece[order]
    counts = torch.bincount(which, minlength=num_targets)
    nth = torch.arange(len(which), device=which.device) - (counts.cumsum(0) - counts)[which]
    kind = torch.zeros(num_targets, dtype=torch.int64, device=which.device)
    for n in range(int(counts.amax()) if num_targets else 0):
        slot = torch.zeros_like(kind)
        slot[which[nth == n]] = piece[nth == n]
        kind = (kind * (len(piece) + 1) + slot).unique(return_inverse=True)[1]
    return kind
