# SPDX-License-Identifier: Apache-2.0
"""`BlockLayout`: which kv blocks each q block visits, and which pairs inside those blocks are visible.

Patterns and selectors produce layouts; kernels consume them. A layout is a CSR of kv block indices. Each row stores its
partial blocks first and its full blocks after them, so a kernel runs two plain loops: one with masks, one without.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.dense import entries_of_dense, layout_to_dense
from dynaxx.layout.derived import DerivedValues, Unset
from dynaxx.layout.entries import (
    Entries,
    check_block_indices,
    entries_of_block_indices,
    entries_of_heads,
    sorted_entries,
    stacked_entries,
)
from dynaxx.layout.grid import BlockGrid, as_block_size
from dynaxx.layout.host import lasting, moved_together
from dynaxx.layout.host_metadata import attach, set_form
from dynaxx.layout.layout_tensors import LayoutTensors
from dynaxx.layout.masks import ElementMasks
from dynaxx.layout.on_gpu import rows_on_gpu


@dataclass(frozen=True, eq=False)
class BlockLayout(LayoutTensors):
    """The kv blocks that each q block visits, and the visible pairs inside them.

    Row `(b, h, i)` owns the entries `kv_indptr[b, h, i] : kv_indptr[b, h, i + 1]`. Its first `kv_num_partial[b, h, i]`
    entries are partial blocks, masked by `masks`; the remaining entries are full blocks. Block indices ascend within
    the partial entries and within the full entries. A full block shows every pair that lies within the sequence
    lengths; kernels bound-check the last row and the last column of blocks themselves. `layout_batch` is 1 if all batch
    entries share the layout, and `layout_heads` is 1 if all heads share it; `layout_heads` counts q heads.

    Args:
        seqlen_q, seqlen_k: sequence lengths in tokens.
        block_size: (q_block, kv_block) in tokens, each 16, 32, 64 or 128.
        kv_indptr: (layout_batch, layout_heads, q_blocks + 1) int32, absolute offsets into `kv_indices`.
        kv_num_partial: (layout_batch, layout_heads, q_blocks) int32, number of partial blocks per row.
        kv_indices: (capacity >= nnz,) int32, 0 <= index < kv_blocks; entries past the last row are ignored.
        kv_masks: (capacity,) int32, index into `masks` for a partial block, -1 for a full block.
        masks: element masks of the partial blocks.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or device. `validate` checks the values: constructors that take
            user data call it, and `sparse_attention` calls it before a launch on the CPU.
    """

    # ---- constructors --------------------------------------------------------------------------------------------

    @classmethod
    @lasting
    def from_entries(
        cls,
        grid: BlockGrid,
        flat_rows: Tensor,
        cols: Tensor,
        mask_ids: Tensor,
        masks: ElementMasks,
        *,
        layout_batch: int = 1,
        layout_heads: int = 1,
    ) -> BlockLayout:
        """Build a layout from an unsorted list of visited blocks.

        Args:
            grid: sequence lengths and block size.
            flat_rows: (n,) int64, flat row `(b * layout_heads + h) * q_blocks + i` of each visited block, in any order.
            cols: (n,) int64, kv block of each visited block.
            mask_ids: (n,) int64, index into `masks` or FULL; entries with id EMPTY are dropped.
            masks: element masks that `mask_ids` refer to.
            layout_batch: batch entries that `flat_rows` counts; 1 if shared.
            layout_heads: q heads that `flat_rows` counts; 1 if shared.
        """
        return BlockLayout._of(grid, Entries(flat_rows, cols, mask_ids, masks, layout_batch, layout_heads))

    @staticmethod
    def _of(grid: BlockGrid, entries: Entries) -> BlockLayout:
        return BlockLayout(grid.seqlen_q, grid.seqlen_k, grid.block_size, *sorted_entries(grid, entries))

    @classmethod
    @typed
    @lasting
    def from_block_indices(
        cls,
        block_indices: Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
        causal: bool = True,
    ) -> BlockLayout:
        """Build a layout from kv block indices, for example from the result of a selection.

        Args:
            block_indices: (batch | 1, q_heads | 1, q_blocks, slots), any integer dtype, in any order; -1 marks an empty
                slot. Under `causal`, blocks that lie entirely after the last query of their row are dropped.
            seqlen_q: number of queries.
            seqlen_k: number of keys; defaults to `seqlen_q`.
            block_size: tokens per block, one number or (q_block, kv_block).
            causal: hide keys after the query.

        Indices on a GPU are not waited for: those that are out of range or occur twice in a row are left out, and
        `validate` raises. With `DYNAXX_CHECK_INDICES=1` this function calls it.

        Raises:
            TypeError: `block_indices` is not an integer tensor.
            ValueError: an index is out of range or occurs twice in a row, or the shape is wrong.
        """

        def checked_grid() -> BlockGrid:
            grid = BlockGrid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, as_block_size(block_size), causal)
            check_block_indices(block_indices, grid)
            return grid

        size = tuple(block_size) if isinstance(block_size, list) else block_size
        rows = rows_on_gpu(block_indices, checked_grid, seqlen_q, seqlen_k, size, causal)
        if rows is None:
            grid = checked_grid()
            return BlockLayout._of(grid, entries_of_block_indices(block_indices, grid))
        layout = BlockLayout._made_by_kernels(rows.grid, rows.tensors, rows.masks, rows.form)
        layout.derived.refused = rows.refused
        return layout.validate() if rows.is_checked else layout

    @staticmethod
    def _made_by_kernels(
        grid: BlockGrid, tensors: Sequence[Tensor], masks: ElementMasks, form: Hashable
    ) -> BlockLayout:
        """Return a layout of views of one buffer without `check_form`, which takes as long as a launch."""
        layout: BlockLayout = object.__new__(BlockLayout)
        names = ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks")
        sizes = {"seqlen_q": grid.seqlen_q, "seqlen_k": grid.seqlen_k, "block_size": grid.block_size}
        vars(layout).update(sizes, **dict(zip(names, tensors, strict=True)), masks=masks, derived=DerivedValues())
        layout.derived.watch((tensors[0], masks.bits, masks.bands))  # the others are views of the same memory
        return set_form(layout, form)

    @classmethod
    @typed
    @lasting
    def from_dense(cls, mask: Tensor, *, block_size: int | tuple[int, int] = 128) -> BlockLayout:
        """Build a layout from a dense boolean mask.

        Args:
            mask: (seqlen_q, seqlen_k) or (batch | 1, q_heads | 1, seqlen_q, seqlen_k) bool, True = visible.
            block_size: tokens per block, one number or (q_block, kv_block).

        Raises:
            TypeError: `mask` is not a tensor.
            ValueError: `mask` has another dtype or shape, or `block_size` is not supported.
        """
        return BlockLayout._of(*entries_of_dense(mask, as_block_size(block_size)))

    @classmethod
    @typed
    @lasting
    def stack_heads(cls, layouts: Sequence[BlockLayout]) -> BlockLayout:
        """Concatenate layouts along the heads. All layouts must have the same lengths, block size, batch and device.

        Raises:
            TypeError: an element is not a BlockLayout.
            ValueError: `layouts` is empty, or its layouts differ in lengths, block size, batch or device.
        """
        return cls._stacked(layouts, "heads")

    @classmethod
    @typed
    @lasting
    def stack_batch(cls, layouts: Sequence[BlockLayout]) -> BlockLayout:
        """Concatenate layouts along the batch, for example one per batch entry; see `stack_heads`.

        Raises:
            TypeError: an element is not a BlockLayout.
            ValueError: `layouts` is empty, or its layouts differ in lengths, block size, heads or device.
        """
        return cls._stacked(layouts, "batch")

    @classmethod
    def _stacked(cls, layouts: Sequence[BlockLayout], along: str) -> BlockLayout:
        for each in layouts:
            if not isinstance(each, BlockLayout):
                raise TypeError(f"`layouts` must be BlockLayouts, got {type(each).__name__}")
        entries = stacked_entries(layouts, along)
        return BlockLayout._of(layouts[0].grid(), entries)

    # ---- conversion ----------------------------------------------------------------------------------------------

    @property
    def host(self) -> BlockLayout | None:
        """This layout if it lies on the host, else the host layout that it was copied from, or None."""
        if self.device.type == "cpu":
            return self
        known = self.derived.host
        if isinstance(known, Unset):
            make = self.derived.make_host
            known = self.derived.host = None if make is None else make()
        return known

    @typed
    @lasting
    def to(self, device: torch.device | str) -> BlockLayout:
        """Return this layout on another device. The call does not wait for a copy to a GPU to finish."""
        if torch.device(device) == self.device:
            return self
        parts = [*self.tensors, *([] if self.kv_order is None else [self.kv_order])]
        indptr, num_partial, indices, mask_ids, bits, bands, *order = moved_together(parts, torch.device(device))
        masks = ElementMasks(bits, bands, self.masks.kv_block)
        there = BlockLayout(
            self.seqlen_q, self.seqlen_k, self.block_size, indptr, num_partial, indices, mask_ids, masks
        )
        attach(there, lambda: self.host, order[0] if order else None)
        return there

    @typed
    @lasting
    def head_slice(self, heads: Sequence[int]) -> BlockLayout:
        """Return the layout of the given heads, in their order. A layout that all heads share is returned unchanged.

        Raises:
            ValueError: `heads` is empty, contains a head that does not exist, or names a head twice.
        """
        return self if self.layout_heads == 1 else BlockLayout._of(self.grid(), entries_of_heads(self, heads))

    def to_dense(self) -> Tensor:
        """Return (layout_batch, layout_heads, seqlen_q, seqlen_k) bool, True = visible. For tests and small inputs."""
        return layout_to_dense(self)

    def plot(self, *, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draw one head with matplotlib: visible pairs, and the hidden pairs of partial blocks. For small layouts.

        Args:
            batch: batch entry to draw; 0 if all share the layout.
            head: q head to draw; 0 if all share the layout.
            ax: matplotlib axes to draw on; created if omitted.

        Returns:
            The axes. `layout.plot().figure.savefig("layout.svg")` saves the picture.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the layout has no such batch entry or head.
        """
        from dynaxx.layout.plot import plot_layout

        return plot_layout(self.to("cpu"), batch=batch, head=head, ax=ax)

    def __repr__(self) -> str:
        """Return the lengths, the block size and the number of entries, which a meta tensor does not know."""
        nnz = "unknown" if self.device.type == "meta" else self.nnz
        return (
            f"BlockLayout(seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, block_size={self.block_size}, "
            f"layout_batch={self.layout_batch}, layout_heads={self.layout_heads}, nnz={nnz}, "
            f"element_masks={len(self.masks)}, device={self.device})"
        )
