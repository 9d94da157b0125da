# SPDX-License-Identifier: Apache-2.0
"""`PackedLayout`: one layout for a packed batch, whose sequences follow one another on one axis.

A packed layout is a `BlockLayout` over the packed axis, so every kernel treats it as a batch of one. Its blocks are
aligned to the start of the packed axis, but the blocks of a sequence's own layout are aligned to the start of the
sequence. `pack_layouts` therefore cuts each source block at the packed grid into up to four pieces. A packed block
shows the union of its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import as_integer, typed
from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.grid import BlockGrid, as_block_size
from dynaxx.layout.host import lasting, never_traced, refuse_mapped
from dynaxx.layout.host_metadata import attach
from dynaxx.layout.masks import FULL, ElementMasks
from dynaxx.layout.pieces import cut, union_masks

CuSeqlens: TypeAlias = Tensor | Sequence[int]  # cumulative lengths (0, ..., total), num_seqs + 1 numbers


@dataclass(frozen=True, eq=False)
class PackedLayout(BlockLayout):
    """A layout over packed tokens; no query sees a key of another sequence.

    Sequence `s` has queries `cu_seqlens_q[s] : cu_seqlens_q[s + 1]` and keys `cu_seqlens_k[s] : cu_seqlens_k[s + 1]`.

    Args:
        cu_seqlens_q, cu_seqlens_k: (num_seqs + 1,) int32, on the host; one tensor if they are equal. The other fields
            are those of `BlockLayout`.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @typed
    @override
    def to(self, device: torch.device | str) -> PackedLayout:
        if torch.device(device) == self.device:
            return self
        moved = BlockLayout.to(self, device)
        packed = with_lengths(moved, self.cu_seqlens_q, self.cu_seqlens_k)
        attach(packed, lambda: self.host, moved.kv_order)
        return packed

    def visible_blocks(self, causal: bool = True) -> int:
        """Return how many blocks of the packed axis, over all rows, hold a (causally) visible pair of one sequence."""
        return _dense_blocks(self.cu_seqlens_q, self.cu_seqlens_k, self.block_size, causal) * self.layout_heads

    __repr__ = BlockLayout.__repr__


@never_traced
def host_lengths(name: str, cu_seqlens: CuSeqlens) -> tuple[int, ...]:
    """Return cumulative lengths as host integers; reads them back from a GPU.

    Raises:
        TypeError: the lengths are not integers.
        ValueError: the lengths do not start at 0, or decrease.
    """
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim != 1:
        raise ValueError(f"`{name}` must be (num_seqs + 1,), got shape {tuple(cu_seqlens.shape)}")
    refuse_mapped(cu_seqlens)
    given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    ends = tuple(as_integer(name, end) for end in given)
    if not ends or ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
        raise ValueError(f"`{name}` must start at 0 and never decrease, got {ends[:8]}")
    return ends


@typed
@lasting
def pack_layouts(
    layouts: Sequence[BlockLayout | None],
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    *,
    block_size: int | tuple[int, int],
) -> PackedLayout:
    """Merge one layout per sequence into one layout over packed tokens. Exact; O(visited blocks).

    Args:
        layouts: one layout per sequence, for the lengths of that sequence, with batch 1 and equal numbers of heads;
            None for a sequence that shows nothing, for example one without queries or keys.
        cu_seqlens_q: (num_seqs + 1,) cumulative numbers of queries, starting at 0.
        cu_seqlens_k: (num_seqs + 1,) cumulative numbers of keys; defaults to `cu_seqlens_q`.
        block_size: tokens per block of all layouts and of the result, one number or (q_block, kv_block).

    Returns:
        A layout with layout_batch 1. If sequences start inside a block, it visits up to four times as many blocks as
        all `layouts` together; if every start is a multiple of the block size, it visits equally many.

    Raises:
        ValueError: the layouts do not match the lengths or one another.
    """
    starts_q = host_lengths("cu_seqlens_q", cu_seqlens_q)
    starts_k = starts_q if cu_seqlens_k is None else host_lengths("cu_seqlens_k", cu_seqlens_k)
    present = _checked(layouts, starts_q, starts_k, as_block_size(block_size))
    if not present:
        nothing = BlockGrid(starts_q[-1], starts_k[-1], as_block_size(block_size), causal=False)
        none = torch.zeros(0, dtype=torch.int64)
        base = BlockLayout.from_entries(nothing, none, none, none, ElementMasks.empty(nothing.block_size))
        return with_lengths(base, starts_q, starts_k)
    first = present[0][1]
    grid = BlockGrid(starts_q[-1], starts_k[-1], first.block_size, causal=False)
    pieces, table = cut(present, starts_q, starts_k)
    targets, which = pieces.target.unique(return_inverse=True)
    row = targets // max(1, grid.kv_blocks)
    col = targets % max(1, grid.kv_blocks)
    height = (grid.seqlen_q - row % max(1, grid.q_blocks) * first.block_size[0]).clamp(max=first.block_size[0])
    width = (grid.seqlen_k - col * first.block_size[1]).clamp(max=first.block_size[1])
    covered = torch.zeros_like(targets).index_add_(0, which, pieces.area() * (pieces.mask_id == FULL))
    mask_ids = torch.full_like(targets, FULL)
    partial = covered < height * width
    masks, mask_ids[partial] = union_masks(pieces, which, partial, table, first.block_size)
    base = BlockLayout.from_entries(grid, row, col, mask_ids, masks, layout_heads=first.layout_heads)
    return with_lengths(base, starts_q, starts_k)


def with_lengths(base: BlockLayout, ends_q: CuSeqlens, ends_k: CuSeqlens) -> PackedLayout:
    """Return a layout over packed tokens with the cumulative lengths of its sequences."""
    own = {field.name: getattr(base, field.name) for field in fields(BlockLayout) if field.init}
    q, k = (torch.tensor(ends, dtype=torch.int32, device="cpu") for ends in map(_as_list, (ends_q, ends_k)))
    return PackedLayout(**own, cu_seqlens_q=q, cu_seqlens_k=q if torch.equal(q, k) else k)


def _as_list(ends: CuSeqlens) -> Sequence[int]:
    """Return cumulative lengths as numbers, so that a layout never shares a tensor with its caller."""
    return ends.tolist() if isinstance(ends, Tensor) else ends


def _checked(
    layouts: Sequence[BlockLayout | None],
    starts_q: tuple[int, ...],
    starts_k: tuple[int, ...],
    block_size: tuple[int, int],
) -> list[tuple[int, BlockLayout]]:
    """Check the layouts and return (sequence, layout) for every sequence that has a layout."""
    if not len(layouts) == len(starts_q) - 1 == len(starts_k) - 1:
        raise ValueError(
            "`layouts`, `cu_seqlens_q` and `cu_seqlens_k` must describe the same number of sequences, "
            f"got {len(layouts)}, {len(starts_q) - 1} and {len(starts_k) - 1}"
        )
    present = [(s, layout) for s, layout in enumerate(layouts) if layout is not None]
    for s, layout in present:
        lengths = (starts_q[s + 1] - starts_q[s], starts_k[s + 1] - starts_k[s])
        if (layout.seqlen_q, layout.seqlen_k) != lengths:
            raise ValueError(f"`layouts[{s}]` must be for {lengths} tokens, got {layout.seqlen_q} x {layout.seqlen_k}")
        first = present[0][1]
        kind = (layout.block_size, layout.layout_batch, layout.layout_heads, layout.device)
        if kind != (block_size, 1, first.layout_heads, first.device):
            raise ValueError(
                "`layouts` must agree in block size, heads and device, and have batch 1: expected "
                f"{(block_size, 1, first.layout_heads, first.device)}, got {kind}"
            )
    return present


def _dense_blocks(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: tuple[int, int], causal: bool) -> int:
    """Count the blocks of the packed axis that hold a (causally) visible pair of one sequence. O(rows + sequences)."""
    total, (q_block, kv_block) = 0, block_size
    last_row, last_col = -1, -1
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        for row in range(q0 // q_block, -(-q1 // q_block) if q1 > q0 else 0):
            end = k1 - q1 + min(q1, (row + 1) * q_block) if causal else k1  # last key that the row sees, + 1
            if end <= k0:
                continue
            begin = max(k0 // kv_block, last_col + 1 if row == last_row else 0)
            last = (end - 1) // kv_block
            total += max(0, last - begin + 1)
            last_row, last_col = row, max(last, last_col) if row == last_row else last
    return total
