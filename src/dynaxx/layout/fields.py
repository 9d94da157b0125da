# SPDX-License-Identifier: Apache-2.0
"""`LayoutFields`: the tensors of a layout and its sizes, which every other file about layouts reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dynaxx.derivatives import untransformed
from dynaxx.layout.derived import DerivedValues
from dynaxx.layout.grid import BlockGrid
from dynaxx.layout.masks import ElementMasks


@dataclass(frozen=True, eq=False)
class LayoutFields:
    """Base of `BlockLayout`, which describes the fields."""

    seqlen_q: int
    seqlen_k: int
    block_size: tuple[int, int]
    kv_indptr: Tensor
    kv_num_partial: Tensor
    kv_indices: Tensor
    kv_masks: Tensor
    masks: ElementMasks
    derived: DerivedValues = field(default_factory=DerivedValues, init=False, repr=False)

    @property
    def q_blocks(self) -> int:
        """Return the number of q blocks."""
        return -(-self.seqlen_q // self.block_size[0])

    @property
    def kv_blocks(self) -> int:
        """Return the number of kv blocks."""
        return -(-self.seqlen_k // self.block_size[1])

    @property
    def layout_batch(self) -> int:
        """Return the number of batch entries with layouts of their own; 1 if all share one."""
        return self.kv_indptr.shape[0]

    @property
    def layout_heads(self) -> int:
        """Return the number of q heads with layouts of their own; 1 if all share one."""
        return self.kv_indptr.shape[1]

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.kv_indptr.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All six tensors of the layout; with the lengths and the block size they describe it completely."""
        masks = self.masks
        return self.kv_indptr, self.kv_num_partial, self.kv_indices, self.kv_masks, masks.bits, masks.bands

    def grid(self, causal: bool = True) -> BlockGrid:
        """Return the lengths and block size of this layout as a `BlockGrid`."""
        return BlockGrid(self.seqlen_q, self.seqlen_k, self.block_size, causal)

    @property
    def nnz(self) -> int:
        """Number of visited blocks over all rows. The first access reads it back from the device."""
        known = self.derived.nnz
        if known is None:
            with untransformed():
                known = self.derived.nnz = int(self.kv_indptr.flatten()[-1]) if self.kv_indptr.numel() else 0
        return known

    @property
    def kv_num_blocks(self) -> Tensor:
        """Number of visited kv blocks per row, partial and full: (layout_batch, layout_heads, q_blocks) int32."""
        known = self.derived.kv_num_blocks
        if known is None:
            with untransformed():
                known = self.derived.kv_num_blocks = self.kv_indptr.diff(dim=-1)
        return known

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the flat row, kv block and mask id of every visited block, each (nnz,) int64, in stored order."""
        counts = self.kv_num_blocks.flatten().long()
        flat_rows = torch.repeat_interleave(
            torch.arange(counts.numel(), device=self.device), counts, output_size=self.nnz
        )
        return flat_rows, self.kv_indices[: self.nnz].long(), self.kv_masks[: self.nnz].long()
