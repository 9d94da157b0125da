"""`BlockLayout`, the one currency: which kv blocks each q block visits, and which of their elements are visible.

Everything that decides where to attend makes one, everything that computes attention reads one. It is a CSR of kv block
indices whose rows hold the partial blocks first and the full blocks after them, so a kernel runs two plain loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from dynaxx.layout.grid import BlockGrid, as_block_size
from dynaxx.layout.host import moved_together, on_host
from dynaxx.layout.masks import EMPTY, FULL, ElementMasks, causal_codes, causal_masks


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Visited kv blocks per q block, exact to the element.

    Row `(b, h, i)` owns entries `kv_indptr[b, h, i] : kv_indptr[b, h, i + 1]`; the first `kv_num_partial[b, h, i]` of
    them are partial blocks, masked by `masks`, the rest are full. A full block shows every pair that lies within the
    lengths: kernels bound-check the last row and column of blocks themselves. Within each of the two parts the indices
    ascend. `layout_batch` and `layout_heads` are 1 where the layout is shared; `layout_heads` counts q heads.

    Raises:
        ValueError: on a wrong shape, dtype or device. Values are checked by `validate`, which constructors from a
            user's data call, and before a launch by `sparse_attention` on the CPU.
    """

    seqlen_q: int
    seqlen_k: int
    block_size: tuple[int, int]  # (q_block, kv_block) tokens, each 16, 32, 64 or 128
    kv_indptr: Tensor  # (layout_batch, layout_heads, q_blocks + 1) int32, absolute offsets into `kv_indices`
    kv_num_partial: Tensor  # (layout_batch, layout_heads, q_blocks) int32
    kv_indices: Tensor  # (capacity >= nnz,) int32, 0 <= index < kv_blocks; entries past the last row are ignored
    kv_masks: Tensor  # (capacity,) int32: entry of `masks` for a partial block, -1 for a full one
    masks: ElementMasks

    def __post_init__(self) -> None:
        as_block_size(self.block_size)
        tensors = {"kv_indptr": 3, "kv_num_partial": 3, "kv_indices": 1, "kv_masks": 1}
        for name, rank in tensors.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.ndim != rank:
                raise ValueError(f"`{name}` must be int32 of rank {rank}, got {tensor.dtype} {tuple(tensor.shape)}")
            if tensor.device != self.kv_indptr.device:
                raise ValueError(f"`{name}` must be on {self.kv_indptr.device}, got {tensor.device}")
        rows = (*self.kv_indptr.shape[:2], self.q_blocks)
        if self.kv_indptr.shape[2] != self.q_blocks + 1:
            raise ValueError(
                f"`kv_indptr` must have q_blocks + 1 = {self.q_blocks + 1} offsets per head, "
                f"got {self.kv_indptr.shape[2]}"
            )
        if tuple(self.kv_num_partial.shape) != rows:
            raise ValueError(f"`kv_num_partial` must be {rows}, got {tuple(self.kv_num_partial.shape)}")
        if self.kv_masks.shape != self.kv_indices.shape:
            raise ValueError(
                "`kv_masks` must have one entry per entry of `kv_indices`, "
                f"got {self.kv_masks.numel()} and {self.kv_indices.numel()}"
            )
        if tuple(self.masks.bits.shape[1:]) != (self.block_size[0], -(-self.block_size[1] // 32)):
            raise ValueError(
                f"`masks` must be of block size {self.block_size}, got bits {tuple(self.masks.bits.shape)}"
            )

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

    @cached_property
    def nnz(self) -> int:
        """Visited blocks over all rows. Reads back from the device once."""
        return int(self.kv_indptr.flatten()[-1]) if self.q_blocks else 0

    @cached_property
    def kv_num_blocks(self) -> Tensor:
        """Visited kv blocks per row, partial and full, (layout_batch, layout_heads, q_blocks) int32."""
        return self.kv_indptr.diff(dim=-1)

    @cached_property
    def kv_order(self) -> Tensor | None:
        """Rows with the longest first, (layout_batch, layout_heads, q_blocks) int32: the order to start them in.

        None where the last rows are the longest, as under a causal mask, and for a layout made on a GPU, which is not
        read back: a kernel then starts with the last row.
        """
        counts = self.kv_num_blocks
        if self.device.type != "cpu" or bool((counts.diff(dim=-1) >= 0).all()):
            return None
        return counts.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    @property
    def host(self) -> BlockLayout | None:
        """This layout on the host, where it is there or came from there: what can be read without waiting."""
        return self if self.device.type == "cpu" else self._source

    @cached_property
    def _source(self) -> BlockLayout | None:
        found: BlockLayout | None = vars(self).get("_on_host", lambda: None)()
        return found

    def grid(self, causal: bool = True) -> BlockGrid:
        return BlockGrid(self.seqlen_q, self.seqlen_k, self.block_size, causal)

    @on_host
    def density(self, causal: bool = True) -> float:
        """Visited blocks / (causally) visible blocks, averaged over batch and heads; 1.0 is dense."""
        return self.nnz / max(1, self.visible_blocks(causal))

    def visible_blocks(self, causal: bool = True) -> int:
        """(Causally) visible blocks over all rows, what density is a share of. From lengths alone, on the host."""
        return self.grid(causal).visible_blocks() * self.layout_batch * self.layout_heads

    def visible_pairs(self) -> Tensor:
        """(layout_batch, layout_heads) int64: visible (query, key) pairs, what useful FLOPs are counted from."""
        lead, cols, codes = self.entries()
        q_block, kv_block = self.block_size
        rows = lead % self.q_blocks if self.q_blocks else lead
        height = (self.seqlen_q - rows * q_block).clamp(max=q_block)
        width = (self.seqlen_k - cols * kv_block).clamp(max=kv_block)
        dense = self.masks.to_dense()
        pairs = height * width
        partial = codes != FULL
        whole = (height == q_block) & (width == kv_block)
        if len(self.masks):
            counts = dense.sum((1, 2))
            pairs = torch.where(partial, counts[codes.clamp(min=0)], pairs)
            for entry in (partial & ~whole).nonzero().flatten().tolist():
                h, w = int(height[entry]), int(width[entry])
                pairs[entry] = dense[codes[entry], :h, :w].sum()
        heads = lead // max(1, self.q_blocks)
        total = torch.zeros(self.layout_batch * self.layout_heads, dtype=torch.int64, device=self.device)
        return total.index_add_(0, heads, pairs).view(self.layout_batch, self.layout_heads)

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
        kept = codes != EMPTY
        lead, cols, codes = lead[kept], cols[kept], codes[kept]
        full = (codes == FULL).long()
        order = ((lead * 2 + full) * max(1, grid.kv_blocks) + cols).argsort()
        num_rows = layout_batch * layout_heads * grid.q_blocks
        shape = (layout_batch, layout_heads, grid.q_blocks)
        counts = torch.bincount(lead, minlength=num_rows)
        partial = torch.bincount(lead, weights=1.0 - full, minlength=num_rows) if lead.numel() else counts
        return cls(
            seqlen_q=grid.seqlen_q,
            seqlen_k=grid.seqlen_k,
            block_size=grid.block_size,
            kv_indptr=row_offsets(counts.view(shape)),
            kv_num_partial=partial.view(shape).to(torch.int32),
            kv_indices=cols[order].to(torch.int32),
            kv_masks=codes[order].to(torch.int32),
            masks=masks.to(lead.device),
        )

    @classmethod
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

        Raises:
            ValueError: an index out of range, a duplicate in a row, or a wrong shape.
        """
        grid = BlockGrid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, as_block_size(block_size), causal)
        if block_indices.ndim != 4 or block_indices.shape[2] != grid.q_blocks:
            raise ValueError(
                f"`block_indices` must be (batch | 1, q_heads | 1, q_blocks = {grid.q_blocks}, slots), "
                f"got {tuple(block_indices.shape)}"
            )
        if block_indices.is_floating_point() or block_indices.dtype == torch.bool:
            raise TypeError(f"`block_indices` must be integers, got {block_indices.dtype}")
        wrong = (block_indices < -1) | (block_indices >= grid.kv_blocks)
        if wrong.any():
            raise ValueError(
                f"`block_indices` must be -1 or in [0, kv_blocks = {grid.kv_blocks}), "
                f"got {block_indices[wrong][0].item()}"
            )
        ordered = block_indices.sort(-1).values
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
            raise ValueError(
                "`block_indices` must not name a block twice in one row; drop duplicates or set them to -1"
            )
        batch, heads = block_indices.shape[:2]
        lead, slot = (block_indices.flatten(0, 2) >= 0).nonzero(as_tuple=True)
        cols = block_indices.flatten(0, 2)[lead, slot].long()
        codes = causal_codes(grid, lead % max(1, grid.q_blocks), cols)
        return cls.from_entries(grid, lead, cols, codes, causal_masks(grid), layout_batch=batch, layout_heads=heads)

    @classmethod
    @on_host
    def from_dense(cls, mask: Tensor, *, block_size: int | tuple[int, int] = 128) -> BlockLayout:
        """From a (seqlen_q, seqlen_k) or (batch | 1, q_heads | 1, seqlen_q, seqlen_k) bool mask, True = visible."""
        from dynaxx.layout.convert import layout_from_dense

        return layout_from_dense(mask, as_block_size(block_size))

    @classmethod
    def stack_heads(cls, layouts: Sequence[BlockLayout]) -> BlockLayout:
        """One layout from several of the same lengths and blocks, side by side along the heads."""
        first = layouts[0]
        for other in layouts:
            same = (other.seqlen_q, other.seqlen_k, other.block_size, other.layout_batch)
            if same != (first.seqlen_q, first.seqlen_k, first.block_size, first.layout_batch):
                raise ValueError(
                    "`layouts` must agree in lengths, block size and batch, got "
                    f"{same} beside {(first.seqlen_q, first.seqlen_k, first.block_size, first.layout_batch)}"
                )
        heads = sum(layout.layout_heads for layout in layouts)
        masks, leads, cols, codes, done = layouts[0].masks, [], [], [], 0
        for index, layout in enumerate(layouts):
            shift = 0
            if index:
                shift, masks = len(masks), masks.append(layout.masks)
            lead, col, code = layout.entries()
            q_blocks = max(1, layout.q_blocks)
            head, row = lead // q_blocks, lead % q_blocks
            batch, head = head // layout.layout_heads, head % layout.layout_heads + done
            leads.append((batch * heads + head) * q_blocks + row)
            cols.append(col)
            codes.append(torch.where(code >= 0, code + shift, code))
            done += layout.layout_heads
        return cls.from_entries(
            first.grid(),
            torch.cat(leads),
            torch.cat(cols),
            torch.cat(codes),
            masks,
            layout_batch=first.layout_batch,
            layout_heads=heads,
        )

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
        if self.q_blocks == 0:
            return self
        starts = self.kv_indptr.flatten(0, 1)
        if int(starts[0, 0]) != 0 or (starts.diff(dim=-1) < 0).any() or (starts[1:, 0] != starts[:-1, -1]).any():
            raise ValueError("`kv_indptr` must start at 0, not fall, and go on from one head to the next")
        if self.nnz > self.kv_indices.numel():
            raise ValueError(f"`kv_indptr` must end within `kv_indices`, got {self.nnz} > {self.kv_indices.numel()}")
        if ((self.kv_num_partial < 0) | (self.kv_num_partial > self.kv_num_blocks)).any():
            raise ValueError("`kv_num_partial` must lie between 0 and the row's number of blocks")
        lead, cols, codes = self.entries()
        if cols.numel() and not 0 <= int(cols.amin()) <= int(cols.amax()) < self.kv_blocks:
            raise ValueError(
                f"`kv_indices` must be in [0, kv_blocks = {self.kv_blocks}), "
                f"got {int(cols.amin())} to {int(cols.amax())}"
            )
        position = torch.arange(cols.numel(), device=self.device) - self.kv_indptr[..., :-1].flatten()[lead]
        partial = position < self.kv_num_partial.flatten()[lead]
        if not torch.where(partial, (codes >= 0) & (codes < len(self.masks)), codes == FULL).all():
            raise ValueError(f"`kv_masks` must be -1 for full blocks and in [0, {len(self.masks)}) for partial ones")
        visited = (lead * self.kv_blocks + cols).sort().values
        if (visited[1:] == visited[:-1]).any():
            raise ValueError("`kv_indices` must not name a block twice in one row")
        return self

    @cached_property
    def validated(self) -> bool:
        """True, or raises as `validate` does; checks once."""
        self.validate()
        return True

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout on another device; a copy to a GPU does not wait for it."""
        if torch.device(device) == self.device:
            return self
        parts = [self.kv_indptr, self.kv_num_partial, self.kv_indices, self.kv_masks, self.masks.bits, self.masks.bands]
        parts += [] if self.kv_order is None else [self.kv_order]
        indptr, num_partial, indices, codes, bits, bands, *order = moved_together(parts, torch.device(device))
        masks = ElementMasks(bits, bands, self.masks.kv_block)
        there = BlockLayout(self.seqlen_q, self.seqlen_k, self.block_size, indptr, num_partial, indices, codes, masks)
        there.__dict__["kv_order"] = order[0] if order else None
        there.__dict__["_on_host"] = lambda: self.host
        return there

    def head_slice(self, heads: Sequence[int]) -> BlockLayout:
        """The layout of some heads only; a shared layout is returned as it is."""
        if self.layout_heads == 1:
            return self
        lead, cols, codes = self.entries()
        new_index = torch.full((self.layout_heads,), -1, device=self.device)
        new_index[torch.tensor(list(heads), device=self.device)] = torch.arange(len(heads), device=self.device)
        head, row = lead // self.q_blocks, lead % self.q_blocks
        batch, head = head // self.layout_heads, new_index[head % self.layout_heads]
        kept = head >= 0
        lead = (batch * len(heads) + head) * self.q_blocks + row
        return BlockLayout.from_entries(
            self.grid(),
            lead[kept],
            cols[kept],
            codes[kept],
            self.masks,
            layout_batch=self.layout_batch,
            layout_heads=len(heads),
        )

    def to_dense(self) -> Tensor:
        """(layout_batch, layout_heads, seqlen_q, seqlen_k) bool, True = visible. For tests and small inputs."""
        from dynaxx.layout.convert import layout_to_dense

        return layout_to_dense(self)

    @cached_property
    def column_counts(self) -> Tensor:
        """Visits of each kv block, (layout_batch, layout_heads, kv_blocks) int64; of a layout on the host."""
        lead, cols, _ = self.entries()
        shape = (self.layout_batch, self.layout_heads, self.kv_blocks)
        if self.layout_batch * self.layout_heads > 1:
            cols = cols + lead // max(1, self.q_blocks) * self.kv_blocks
        return torch.bincount(cols, minlength=prod(shape)).view(shape)

    @cached_property
    def transposed(self) -> TransposedLayout:
        """The same blocks by kv block, for the backward pass over keys. Computed once, where the layout lies.

        A layout on a GPU is not read back: all slots up to the capacity are sorted, the unused ones to the end.
        """
        heads = self.layout_batch * self.layout_heads
        lines = heads * self.kv_blocks
        ends = self.kv_indptr[..., 1:].flatten().contiguous()
        size = vars(self).get("nnz", self.nnz if self.device.type == "cpu" else self.kv_indices.numel())
        slots = torch.arange(size, device=ends.device, dtype=torch.int32)
        rows = torch.searchsorted(ends, slots, right=True, out_int32=True)
        cols, codes = self.kv_indices[:size], self.kv_masks[:size]
        unused = None if "nnz" in vars(self) else rows >= ends.numel()
        if heads > 1:
            head = rows // max(1, self.q_blocks)
            cols = cols + head * self.kv_blocks
            rows = rows - head * self.q_blocks
        place = cols * 2 + (codes == FULL)
        if unused is not None:
            place = place.masked_fill(unused, 2 * lines)
        place, order = place.sort(stable=True)  # slots go by rows, and so do those of one place
        edges = torch.arange(2 * lines + 1, device=ends.device, dtype=torch.int32)
        starts = torch.searchsorted(place, edges, out_int32=True)  # of partial and of full blocks in turn
        shape = (self.layout_batch, self.layout_heads, self.kv_blocks)
        steps = (2 * self.layout_heads * self.kv_blocks, 2 * self.kv_blocks, 2)
        return TransposedLayout(
            q_indptr=starts.as_strided((*shape[:2], shape[2] + 1), steps).contiguous(),
            q_num_partial=(starts[1::2] - starts[:-1:2]).view(shape),
            q_indices=rows[order],
            q_masks=codes[order],
        )

    def __repr__(self) -> str:
        return (
            f"BlockLayout(seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, block_size={self.block_size}, "
            f"layout_batch={self.layout_batch}, layout_heads={self.layout_heads}, nnz={self.nnz}, "
            f"element_masks={len(self.masks)}, device={self.device})"
        )


@dataclass(frozen=True, eq=False)
class TransposedLayout:
    """A `BlockLayout` by kv block: the q blocks that visit it, partial ones first, ascending in each part."""

    q_indptr: Tensor  # (layout_batch, layout_heads, kv_blocks + 1) int32, absolute offsets into `q_indices`
    q_num_partial: Tensor  # (layout_batch, layout_heads, kv_blocks) int32
    q_indices: Tensor  # (nnz,) int32; on a GPU (capacity,), entries past the last row are ignored
    q_masks: Tensor  # as `q_indices`, values as `BlockLayout.kv_masks`


def row_offsets(counts: Tensor) -> Tensor:
    """(b, h, n) counts -> (b, h, n + 1) int32 absolute offsets that go on from one head to the next."""
    ends = counts.flatten().cumsum(0).view(counts.shape)
    starts = ends - counts
    if counts.shape[-1] == 0:
        return counts.new_zeros(*counts.shape[:-1], 1, dtype=torch.int32)
    return torch.cat([starts, ends[..., -1:]], dim=-1).to(torch.int32)
