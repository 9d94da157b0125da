# SPDX-License-Identifier: Apache-2.0
"""`BlockLayout`, the one currency: which kv blocks each q block visits, and which of their elements are visible.

Everything that decides where to attend makes one, everything that computes attention reads one. It is a CSR of kv block
indices whose rows hold the partial blocks first and the full blocks after them, so a kernel runs two plain loops.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.dense import entries_of_dense, layout_to_dense, visible_pairs
from dynaxx.layout.derived import DerivedValues, Unset
from dynaxx.layout.entries import Entries, entries_of_block_indices, entries_of_heads, sorted_entries, stacked_entries
from dynaxx.layout.grid import BlockGrid, as_block_size
from dynaxx.layout.host import moved_together, on_host
from dynaxx.layout.host_metadata import attach
from dynaxx.layout.masks import ElementMasks
from dynaxx.layout.transpose import TransposedLayout, transpose
from dynaxx.layout.validate import check_form, check_values


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Visited kv blocks per q block, exact to the element.

    Row `(b, h, i)` owns entries `kv_indptr[b, h, i] : kv_indptr[b, h, i + 1]`; the first `kv_num_partial[b, h, i]` of
    them are partial blocks, masked by `masks`, the rest are full. A full block shows every pair that lies within the
    lengths: kernels bound-check the last row and column of blocks themselves. Within each of the two parts the indices
    ascend. `layout_batch` and `layout_heads` are 1 where the layout is shared; `layout_heads` counts q heads.

    Args:
        seqlen_q, seqlen_k: tokens.
        block_size: (q_block, kv_block) tokens, each 16, 32, 64 or 128.
        kv_indptr: (layout_batch, layout_heads, q_blocks + 1) int32, absolute offsets into `kv_indices`.
        kv_num_partial: (layout_batch, layout_heads, q_blocks) int32.
        kv_indices: (capacity >= nnz,) int32, 0 <= index < kv_blocks; entries past the last row are ignored.
        kv_masks: (capacity,) int32: entry of `masks` for a partial block, -1 for a full one.
        masks: the element masks of partial blocks.

    Raises:
        ValueError: on a wrong shape, dtype or device. Values are checked by `validate`, which constructors from a
            user's data call, and before a launch by `sparse_attention` on the CPU.
    """

    seqlen_q: int
    seqlen_k: int
    block_size: tuple[int, int]
    kv_indptr: Tensor
    kv_num_partial: Tensor
    kv_indices: Tensor
    kv_masks: Tensor
    masks: ElementMasks
    derived: DerivedValues = field(default_factory=DerivedValues, init=False, repr=False)

    def __post_init__(self) -> None:
        check_form(self)
        self.derived.watch(self.tensors)

    # ---- sizes ---------------------------------------------------------------------------------------------------

    @property
    def q_blocks(self) -> int:
        return -(-self.seqlen_q // self.block_size[0])

    @property
    def kv_blocks(self) -> int:
        return -(-self.seqlen_k // self.block_size[1])

    @property
    def layout_batch(self) -> int:
        return self.kv_indptr.shape[0]

    @property
    def layout_heads(self) -> int:
        return self.kv_indptr.shape[1]

    @property
    def device(self) -> torch.device:
        return self.kv_indptr.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All six: what a kernel, a compiler or a copy needs beside the lengths and the block size."""
        masks = self.masks
        return self.kv_indptr, self.kv_num_partial, self.kv_indices, self.kv_masks, masks.bits, masks.bands

    @property
    def nnz(self) -> int:
        """Visited blocks over all rows. Reads back from the device once."""
        known = self.derived.nnz
        if known is None:
            known = self.derived.nnz = int(self.kv_indptr.flatten()[-1]) if self.q_blocks else 0
        return known

    @property
    def kv_num_blocks(self) -> Tensor:
        """Visited kv blocks per row, partial and full, (layout_batch, layout_heads, q_blocks) int32."""
        known = self.derived.kv_num_blocks
        if known is None:
            known = self.derived.kv_num_blocks = self.kv_indptr.diff(dim=-1)
        return known

    @property
    def kv_order(self) -> Tensor | None:
        """Rows with the longest first, (layout_batch, layout_heads, q_blocks) int32: the order to start them in.

        None where the last rows are the longest, as under a causal mask, and for a layout made on a GPU, which is not
        read back: a kernel then starts with the last row.
        """
        known = self.derived.kv_order
        if isinstance(known, Unset):
            known = self.derived.kv_order = self._longest_first()
        return known

    def _longest_first(self) -> Tensor | None:
        if self.device.type != "cpu":
            return None
        counts = self.kv_num_blocks
        if bool((counts.diff(dim=-1) >= 0).all()):
            return None
        return counts.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    @property
    def form(self) -> Hashable | None:
        """Common to layouts that were chosen alike on a GPU: their tensors differ in addresses and numbers alone."""
        return self.derived.form

    @property
    def host(self) -> BlockLayout | None:
        """This layout on the host, or the one there that it was copied from; None where the host has none."""
        if self.device.type == "cpu":
            return self
        known = self.derived.host
        if isinstance(known, Unset):
            make = self.derived.make_host
            known = self.derived.host = None if make is None else make()
        return known

    def grid(self, causal: bool = True) -> BlockGrid:
        """Its lengths and block size."""
        return BlockGrid(self.seqlen_q, self.seqlen_k, self.block_size, causal)

    @typed
    @on_host
    def density(self, causal: bool = True) -> float:
        """Visited blocks / (causally) visible blocks, averaged over batch and heads; 1.0 is dense."""
        return self.nnz / max(1, self.visible_blocks(causal))

    def visible_blocks(self, causal: bool = True) -> int:
        """(Causally) visible blocks over all rows, what density is a share of. From lengths alone, on the host."""
        return self.grid(causal).visible_blocks() * self.layout_batch * self.layout_heads

    def visible_pairs(self) -> Tensor:
        """(layout_batch, layout_heads) int64: visible (query, key) pairs, what useful FLOPs are counted from."""
        return visible_pairs(self)

    # ---- making one ----------------------------------------------------------------------------------------------

    @classmethod
    def from_entries(
        cls,
        grid: BlockGrid,
        lead: Tensor,
        cols: Tensor,
        codes: Tensor,
        masks: ElementMasks,
        *,
        layout_batch: int = 1,
        layout_heads: int = 1,
    ) -> BlockLayout:
        """Sort visited blocks into a layout.

        Args:
            lead: (n,) int64, flat row `(b * layout_heads + h) * q_blocks + i` of each visited block, in any order.
            cols: (n,) int64, its kv block.
            codes: (n,) int64, entry of `masks`, or FULL; EMPTY entries are dropped.
        """
        return BlockLayout._of(grid, Entries(lead, cols, codes, masks, layout_batch, layout_heads))

    @staticmethod
    def _of(grid: BlockGrid, entries: Entries) -> BlockLayout:
        return BlockLayout(grid.seqlen_q, grid.seqlen_k, grid.block_size, *sorted_entries(grid, entries))

    @classmethod
    @typed
    @on_host
    def from_block_indices(
        cls,
        block_indices: Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
        causal: bool = True,
    ) -> BlockLayout:
        """Take kv block indices as a selection gives them.

        Args:
            block_indices: (batch | 1, q_heads | 1, q_blocks, slots), any integer dtype, in any order; -1 is an empty
                slot. Blocks that lie wholly after the row's last query are dropped under `causal`.
            seqlen_q, seqlen_k, block_size, causal: as `Pattern.layout`.

        Raises:
            TypeError: no tensor, or not of integers.
            ValueError: an index out of range, a duplicate in a row, or a wrong shape.
        """
        grid = BlockGrid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, as_block_size(block_size), causal)
        return BlockLayout._of(grid, entries_of_block_indices(block_indices, grid))

    @classmethod
    @typed
    @on_host
    def from_dense(cls, mask: Tensor, *, block_size: int | tuple[int, int] = 128) -> BlockLayout:
        """From a (seqlen_q, seqlen_k) or (batch | 1, q_heads | 1, seqlen_q, seqlen_k) bool mask, True = visible.

        Raises:
            TypeError, ValueError: no bool tensor of such a shape, or another block size.
        """
        return BlockLayout._of(*entries_of_dense(mask, as_block_size(block_size)))

    @classmethod
    @typed
    def stack_heads(cls, layouts: Sequence[BlockLayout]) -> BlockLayout:
        """One layout from several of the same lengths and blocks, side by side along the heads.

        Raises:
            TypeError, ValueError: none, no layouts, or such as differ in lengths, block size, batch or device.
        """
        for each in layouts:
            if not isinstance(each, BlockLayout):
                raise TypeError(f"`layouts` must be BlockLayouts, got {type(each).__name__}")
        entries = stacked_entries(layouts)
        return BlockLayout._of(layouts[0].grid(), entries)

    # ---- reading one ---------------------------------------------------------------------------------------------

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Flat row, kv block and mask code of every visited block, each (nnz,) int64, in stored order."""
        counts = self.kv_num_blocks.flatten().long()
        lead = torch.repeat_interleave(torch.arange(counts.numel(), device=self.device), counts, output_size=self.nnz)
        return lead, self.kv_indices[: self.nnz].long(), self.kv_masks[: self.nnz].long()

    def validate(self) -> BlockLayout:
        """Check every value; return self. Reads back from the device.

        Raises:
            ValueError: offsets that fall, counts or indices out of range, a block named twice in a row.
        """
        self.drop_stale()
        check_values(self)
        self.derived.validated = True
        return self

    def ensure_valid(self) -> None:
        """Raise as `validate` does. Checks once, and again after a tensor was written to."""
        self.drop_stale()
        if not self.derived.validated:
            self.validate()

    def drop_stale(self) -> None:
        """Drop derived values if a tensor was written to since they were computed."""
        if self.derived.is_stale():
            self.derived.clear()

    @typed
    def to(self, device: torch.device | str) -> BlockLayout:
        """Return the same layout on another device; a copy to a GPU does not wait for it."""
        if torch.device(device) == self.device:
            return self
        parts = [*self.tensors, *([] if self.kv_order is None else [self.kv_order])]
        indptr, num_partial, indices, codes, bits, bands, *order = moved_together(parts, torch.device(device))
        masks = ElementMasks(bits, bands, self.masks.kv_block)
        there = BlockLayout(self.seqlen_q, self.seqlen_k, self.block_size, indptr, num_partial, indices, codes, masks)
        attach(there, lambda: self.host, order[0] if order else None)
        return there

    @typed
    def head_slice(self, heads: Sequence[int]) -> BlockLayout:
        """Return the layout of some heads only, in their order; a shared layout is returned as it is.

        Raises:
            ValueError: none, heads that are not there, or one named twice.
        """
        return self if self.layout_heads == 1 else BlockLayout._of(self.grid(), entries_of_heads(self, heads))

    def to_dense(self) -> Tensor:
        """(layout_batch, layout_heads, seqlen_q, seqlen_k) bool, True = visible. For tests and small inputs."""
        return layout_to_dense(self)

    def plot(self, *, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draw one head with matplotlib: visible pairs, and the hidden pairs of partial blocks. For small layouts.

        Args:
            batch, head: entry to draw; 0 where the layout is shared.
            ax: matplotlib axes to draw on; new ones by default.

        Returns:
            The axes. `layout.plot().figure.savefig("layout.svg")` keeps the picture.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: a batch entry or head that the layout does not have.
        """
        from dynaxx.layout.plot import plot_layout

        return plot_layout(self, batch=batch, head=head, ax=ax)

    @property
    def column_counts(self) -> Tensor:
        """Visits of each kv block, (layout_batch, layout_heads, kv_blocks) int64; of a layout on the host."""
        known = self.derived.column_counts
        if known is None:
            known = self.derived.column_counts = self._count_columns()
        return known

    def _count_columns(self) -> Tensor:
        lead, cols, _ = self.entries()
        shape = (self.layout_batch, self.layout_heads, self.kv_blocks)
        if self.layout_batch * self.layout_heads > 1:
            cols = cols + lead // max(1, self.q_blocks) * self.kv_blocks
        return torch.bincount(cols, minlength=prod(shape)).view(shape)

    @property
    def transposed(self) -> TransposedLayout:
        """The same blocks by kv block, for the backward pass over keys. Computed once, where the layout lies.

        A layout on a GPU is not read back: all slots up to the capacity are sorted, the unused ones to the end.
        """
        known = self.derived.transposed
        if known is None:
            known = self.derived.transposed = transpose(self)
        return known

    def __getstate__(self) -> dict[str, Any]:
        """Leave derived values out of copies and pickles."""
        return {name: value for name, value in vars(self).items() if name != "derived"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, derived=DerivedValues())
        self.derived.watch(self.tensors)

    def __repr__(self) -> str:
        return (
            f"BlockLayout(seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, block_size={self.block_size}, "
            f"layout_batch={self.layout_batch}, layout_heads={self.layout_heads}, nnz={self.nnz}, "
            f"element_masks={len(self.masks)}, device={self.device})"
        )
