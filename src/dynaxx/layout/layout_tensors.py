# SPDX-License-Identifier: Apache-2.0
"""`LayoutTensors`: the checks of a layout, and the values that are derived from its tensors once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import transforms_active, untransformed
from dynaxx.layout.dense import visible_pairs
from dynaxx.layout.derived import DerivedValues, TransposedLayout, Unset
from dynaxx.layout.fields import LayoutFields
from dynaxx.layout.host import lasting_copy, on_host
from dynaxx.layout.masks import FULL
from dynaxx.layout.on_gpu import transposed_on_gpu
from dynaxx.layout.validate import check_form, check_values


def transpose(layout: LayoutFields) -> TransposedLayout:
    """Group the blocks of a layout by kv block, on the layout's device.

    GPU layouts are not read back: all slots up to the capacity are sorted, and unused slots go to the end.
    """
    heads = layout.layout_batch * layout.layout_heads
    lines = heads * layout.kv_blocks
    ends = layout.kv_indptr[..., 1:].flatten().contiguous()
    known = layout.nnz if layout.device.type == "cpu" else layout.derived.nnz
    size = layout.kv_indices.numel() if known is None else known
    slots = torch.arange(size, device=ends.device, dtype=torch.int32)
    rows = torch.searchsorted(ends, slots, right=True, out_int32=True)
    cols, mask_ids = layout.kv_indices[:size], layout.kv_masks[:size]
    unused = rows >= ends.numel() if known is None else None
    if heads > 1:
        head = rows // max(1, layout.q_blocks)
        cols = cols + head * layout.kv_blocks
        rows = rows - head * layout.q_blocks
    place = cols * 2 + (mask_ids == FULL)
    if unused is not None:
        place = place.masked_fill(unused, 2 * lines)
    place, order = place.sort(stable=True)  # slots are in row order, and a stable sort keeps it within each column
    edges = torch.arange(2 * lines + 1, device=ends.device, dtype=torch.int32)
    starts = torch.searchsorted(place, edges, out_int32=True)  # start of each column's partial blocks, then full blocks
    shape = (layout.layout_batch, layout.layout_heads, layout.kv_blocks)
    steps = (2 * layout.layout_heads * layout.kv_blocks, 2 * layout.kv_blocks, 2)
    return TransposedLayout(
        q_indptr=starts.as_strided((*shape[:2], shape[2] + 1), steps).contiguous(),
        q_num_partial=(starts[1::2] - starts[:-1:2]).view(shape),
        q_indices=rows[order],
        q_masks=mask_ids[order],
    )


@dataclass(frozen=True, eq=False)
class LayoutTensors(LayoutFields):
    """Base of `BlockLayout`: what is derived from the fields."""

    def __post_init__(self) -> None:
        """Check the tensors, and register them with the derived values. Tensors of modes are copied."""
        if transforms_active() or any(x.is_inference() for x in self.tensors):
            self.masks.__setstate__(vars(self.masks))
            self.__setstate__(self.__getstate__())
        check_form(self)
        self.derived.watch(self.tensors)

    # ---- sizes ---------------------------------------------------------------------------------------------------

    @property
    def kernel_inputs(self) -> tuple[Tensor | None, ...]:
        """Every tensor that kernels read, in fixed places: `tensors`, the order of rows, the transposed layout."""
        derived, masks = self.derived, self.masks
        order, turned = derived.kv_order, derived.transposed
        return (
            self.kv_indptr,
            self.kv_num_partial,
            self.kv_indices,
            self.kv_masks,
            masks.bits,
            masks.bands,
            None if isinstance(order, Unset) else order,
            *((None,) * 4 if turned is None else turned.tensors),
        )

    @typed
    @on_host
    def density(self, causal: bool = True) -> float:
        """Return visited blocks / (causally) visible blocks, averaged over batch and heads; 1.0 is dense."""
        return self.nnz / max(1, self.visible_blocks(causal))

    def visible_blocks(self, causal: bool = True) -> int:
        """Return the number of (causally) visible blocks over all rows, computed on the host from the lengths alone."""
        return self.grid(causal).visible_blocks() * self.layout_batch * self.layout_heads

    def visible_pairs(self) -> Tensor:
        """Count the visible (query, key) pairs of each head: (layout_batch, layout_heads) int64."""
        return visible_pairs(self)

    def validate(self) -> Self:
        """Check every value and return self. Reads values back from the device.

        Raises:
            ValueError: offsets decrease, a count or index is out of range, or a row names a block twice.
        """
        self.drop_stale()
        with untransformed():
            check_values(self)
        self.derived.validated = True
        return self

    def ensure_valid(self) -> None:
        """Raise like `validate`, but check again only after a tensor was written to."""
        self.drop_stale()
        if not self.derived.validated:
            self.validate()

    def drop_stale(self) -> None:
        """Drop derived values if a tensor was written to after they were computed."""
        if self.derived.is_stale():
            self.derived.clear()

    # ---- derived values --------------------------------------------------------------------------------------------

    @property
    def kv_order(self) -> Tensor | None:
        """Rows in the order kernels start them, longest first: (layout_batch, layout_heads, q_blocks) int32.

        The value is None if row lengths never decrease, as under a causal mask, and for layouts made on a GPU, whose
        lengths are not read back. Kernels then start with the last row.
        """
        known = self.derived.kv_order
        if isinstance(known, Unset):
            with untransformed():
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
        """Key shared by GPU layouts whose tensors differ only in addresses and values; None for all other layouts."""
        return self.derived.form

    @property
    def column_counts(self) -> Tensor:
        """Number of rows that visit each kv block: (layout_batch, layout_heads, kv_blocks) int64. For host layouts."""
        known = self.derived.column_counts
        if known is None:
            with untransformed():
                known = self.derived.column_counts = self._count_columns()
        return known

    @property
    def reach(self) -> int:
        """Largest distance in blocks between a visited block and the diagonal, which ends at the last block of both.

        For host layouts, with q blocks as large as kv blocks.
        """
        known = self.derived.reach
        if known is None:
            flat_rows, cols, _ = self.entries()
            distances = cols - flat_rows % max(1, self.q_blocks) - (self.kv_blocks - self.q_blocks)
            known = self.derived.reach = int(distances.abs().max()) if distances.numel() else 0
        return known

    def _count_columns(self) -> Tensor:
        flat_rows, cols, _ = self.entries()
        shape = (self.layout_batch, self.layout_heads, self.kv_blocks)
        if self.layout_batch * self.layout_heads > 1:
            cols = cols + flat_rows // max(1, self.q_blocks) * self.kv_blocks
        return torch.bincount(cols, minlength=prod(shape)).view(shape)

    @property
    def transposed(self) -> TransposedLayout:
        """The same blocks grouped by kv block, for the backward pass over keys. Computed once, on the layout's device.

        GPU layouts are not read back.
        """
        known = self.derived.transposed
        if known is None:
            with untransformed():
                known = self.derived.transposed = transposed_on_gpu(self) or transpose(self)
        return known

    def with_transposed(self) -> Self:
        """Compute `transposed`, so that `kernel_inputs` contains it, and return self."""
        _ = self.transposed
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Exclude derived values from copies and pickles."""
        return {name: value for name, value in vars(self).items() if name != "derived"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied layout. Derived values are computed again."""
        vars(self).update({name: lasting_copy(x) for name, x in state.items()}, derived=DerivedValues())
        self.derived.watch(self.tensors)
