# SPDX-License-Identifier: Apache-2.0
"""Code that the Hopper kernels over kv blocks share: the mapping of programs to columns, and their launch.

A column is a kv block of one kv head, with the entries of the q heads of its group, one head after another. If a group
is divided into pieces, a column has the q heads of one piece, and `kv_heads` counts the pieces of all kv heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from dynaxx.kernels.attention.hopper.backward_rows import BackwardCall
from dynaxx.kernels.attention.hopper.config import backward_ending, backward_heads_together, tile_width
from dynaxx.kernels.attention.hopper.pieces import none_empty
from dynaxx.kernels.compat import tma_store
from dynaxx.kernels.device import processors
from dynaxx.kernels.primitives.hopper.column_parts import part_first, store_parts, times
from dynaxx.kernels.primitives.hopper.descriptors import gluon_rows, score_factors
from dynaxx.kernels.primitives.hopper.parts import ALL_ENTRIES, WHOLE, part_or_whole, store_part
from dynaxx.kernels.runtime.arguments import transposed_arguments
from dynaxx.kernels.runtime.launch_cache import RecordedCall, record_or_replay
from dynaxx.kernels.schedule.split import SPLIT_SIZES, SplitLines, no_split, split_columns, split_programs
from dynaxx.kernels.schedule.split_sums import of_columns, sum_parts, sum_pieces
from dynaxx.layout import BlockLayout

SIZES = [
    "capacity", "num_masks", "seqlen_k", "q_blocks", "heads", "kv_heads", "group_size", "pieces", "together", "ending",
    *SPLIT_SIZES,
]  # fmt: skip


class ColumnOutputs(NamedTuple):
    """The place where a program stores dk and dv."""

    dk_desc: Any
    dv_desc: Any
    p_sums: Any  # (slots, 2, KV_BLOCK, D) fp32, for parts


class Column(NamedTuple):
    """The kv block that a program computes for a piece of a group, or a part of its entries."""

    i_b: Any
    i_piece: Any  # piece of a group, counted over all kv heads
    i_col: Any
    kv_blocks: Any
    i_h: Any  # first q head of the piece
    heads: Any  # q heads of the piece
    first: Any  # first entry of a part
    last: Any  # last entry of a part + 1
    slot: Any  # slot of a part, WHOLE or NOTHING
    i_hk: Any
    first_head: Any  # like i_h, counted over the batch


@gluon.jit
def column_of(i_program, kv_blocks, heads, kv_heads, together, ending):
    """Return batch entry, kv head and kv block of a program.

    Programs alternate between `together` heads, one set of heads after another. The last `ending` blocks of all heads
    come last. `heads` counts the kv heads of all batch entries. The first blocks start first, because under a causal
    mask most queries see them; short programs at the end let all multiprocessors finish together.
    """
    early = kv_blocks - ending
    first = i_program // (early * together) * together
    i_rest = i_program - first * early
    alternate = gl.minimum(together, heads - first)
    i_late = i_program - heads * early
    head = gl.where(i_late < 0, first + i_rest % alternate, i_late % heads)
    i_col = gl.where(i_late < 0, i_rest // alternate, early + i_late // heads)
    return head // kv_heads, head % kv_heads, i_col


@gluon.jit
def heads_of_piece(i_b, i_piece, kv_heads, group_size, pieces):
    """Return kv head, first q head and number of q heads of a piece, and its first q head counted over the batch."""
    each = (group_size + pieces - 1) // pieces
    i_hk, first = i_piece // pieces, i_piece % pieces * each
    i_h = i_hk * group_size + first
    return i_hk, i_h, gl.minimum(each, group_size - first), i_b * (kv_heads // pieces * group_size) + i_h


@gluon.jit
def read_column(layout, column, i_h, before, HAS_PARTS: gl.constexpr):
    """Return first entry, number of entries and number of partial entries of a column in head i_h, and `before`.

    All entries lie within the layout's capacity. With HAS_PARTS, only entries of the part count; `before` counts the
    entries of earlier heads and is returned including this head's. The loads are not issued one head ahead,
    because triton 3.6's loop-aware CSE mistakes loads that a loop carries to its next iteration for invariant, and then
    uses the first head's number of partial blocks for all heads.
    """
    layout_head = (column.i_b * layout.stride_b + i_h * layout.stride_h).to(gl.int64)
    p_column = layout.tables.p_indptr + layout_head * (column.kv_blocks + 1) + column.i_col
    start = gl.minimum(gl.maximum(gl.load(p_column), 0), layout.capacity)
    count = gl.minimum(gl.maximum(gl.load(p_column + 1), start), layout.capacity) - start
    partial = gl.load(layout.tables.p_num_partial + layout_head * column.kv_blocks + column.i_col)
    partial = gl.minimum(gl.maximum(partial, 0), count)
    if HAS_PARTS:
        begin = gl.minimum(gl.maximum(column.first - before, 0), count)
        end = gl.minimum(gl.maximum(column.last - before, begin), count)
        before += count
        start += begin
        count = end - begin
        partial = gl.minimum(gl.maximum(partial - begin, 0), count)
    return start, count, partial, before


@gluon.jit
def column_or_part(
    i_program, layout, parts, kv_blocks, heads, kv_heads, group_size, pieces, together, ending, HAS_PARTS: gl.constexpr
):
    """Return the `Column` of a program, or its part of one; programs for parts come first."""
    i_whole = i_program - parts.number * parts.batch_copies * parts.head_copies
    i_b, i_piece, i_col = column_of(i_whole, kv_blocks, heads, kv_heads, together, ending)
    first, last, slot = 0, ALL_ENTRIES, WHOLE
    if HAS_PARTS:
        i_b, i_piece, i_col, first, last, slot = part_or_whole(
            i_program, i_b, i_piece, i_col, layout, parts, kv_blocks, kv_heads, group_size // pieces
        )
    i_hk, i_h, group_heads, first_head = heads_of_piece(i_b, i_piece, kv_heads, group_size, pieces)
    return Column(
        i_b=i_b, i_piece=i_piece, i_hk=i_hk, i_h=i_h, heads=group_heads, first_head=first_head,
        i_col=i_col, kv_blocks=kv_blocks, first=first, last=last, slot=slot,
    )  # fmt: skip


@gluon.jit
def store_columns(
    dk, dv, outputs, fed, column, scale, CONSUMER: gl.constexpr, KV_BLOCK: gl.constexpr, HAS_PARTS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Store dk and dv of 64 keys through the buffers of k and v, which are not read again."""
    ROWS: gl.constexpr = dk[0].shape[0]
    D: gl.constexpr = outputs.dk_desc.block_type.shape[3]
    dtype: gl.constexpr = outputs.dk_desc.dtype
    store_parts(fed.k.index(CONSUMER).reshape([ROWS, D]), times(dk, scale), dtype, HEAD_DIM)
    store_parts(fed.v.index(CONSUMER).reshape([ROWS, D]), dv, dtype, HEAD_DIM_V)
    fence_async_shared()
    i_col = column.i_col
    if HAS_PARTS:
        if column.slot >= 0:
            for u in gl.static_range(len(dk)):
                store_part(outputs.p_sums, column.slot, dk[u], 0, CONSUMER * ROWS, KV_BLOCK, D, part_first(HEAD_DIM, u))
            for u in gl.static_range(len(dv)):
                store_part(
                    outputs.p_sums, column.slot, dv[u], 1, CONSUMER * ROWS, KV_BLOCK, D, part_first(HEAD_DIM_V, u)
                )
        i_col = gl.where(column.slot == WHOLE, i_col, column.kv_blocks)  # past the end, where TMA stores nothing
    at = [column.i_b, column.i_piece, i_col * KV_BLOCK + CONSUMER * ROWS, 0]
    tma_store(outputs.dk_desc, at, fed.k.index(CONSUMER))
    tma_store(outputs.dv_desc, at, fed.v.index(CONSUMER))
    tma.store_wait(0)


class ColumnKernel(NamedTuple):
    """A kernel over kv blocks, and its arguments beyond those that all such kernels share."""

    kernel: Any
    others: Callable[..., dict[str, Any]]  # function (layout, q, v, sums of dq or None) -> other arguments
    keys: int = 0  # keys per program; 0 for a whole block

    def gradients(self, call: BackwardCall, pieces: int = 1) -> tuple[Tensor, Tensor]:
        """Return (dk, dv), contiguous. Long columns are split into parts.

        Each piece of a group is computed by a separate program; the pieces are summed afterwards.
        """
        k, v, layout = call.k, call.v, call.layout
        pieces, split = divided_columns(call.q, k, layout, pieces)
        dk, dv = (x.new_empty(*x.shape[:2], k.shape[2] * pieces, x.shape[3]) for x in (k, v))
        self._fill(call, dk, dv, split)
        return sum_pieces(dk, dv, pieces, layout) if pieces > 1 else (dk, dv)

    def _fill(self, call: BackwardCall, dk: Tensor, dv: Tensor, split: SplitLines | None) -> None:
        do, q, k, v, rows, layout, scale, softcap = call
        start: RecordedCall = _start
        tensors: tuple[Tensor, ...] = (do, q, k, v, dk, dv, rows.lse, rows.delta)
        if rows.sums is not None:
            start, tensors = _start_with_sums, (rows.sums, *tensors)
        if split is None:
            record_or_replay(start, layout.with_transposed(), tensors, self, scale, softcap)
            return
        kv_block = layout.block_size[1]
        parts = split.places(q, 2, kv_block, tile_width(q.shape[3]))
        record_or_replay(start, layout.with_transposed(), tensors, self, scale, softcap, split=split.to(p_sums=parts))
        sum_parts(of_columns(parts[:, 0], k.shape[3]), dk, split, layout, kv_block, scale)
        sum_parts(of_columns(parts[:, 1], v.shape[3]), dv, split, layout, kv_block)


def divided_columns(q: Tensor, k: Tensor, layout: BlockLayout, pieces: int) -> tuple[int, SplitLines | None]:
    """Return the pieces of a group, at most as many as asked for, and the columns that are split."""
    q_heads, kv_heads = q.shape[2], k.shape[2]
    pieces = none_empty(q_heads // kv_heads, pieces)
    split = split_columns(layout, k.shape[0], q_heads, kv_heads)
    if split is not None and pieces > 1:
        pieces = pieces if q_heads % (kv_heads * pieces) == 0 else q_heads // kv_heads  # parts need equal pieces
        split = split_columns(layout, k.shape[0], q_heads, kv_heads * pieces)
    return pieces, split


def _start(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    lse: Tensor,
    delta: Tensor,
    column_kernel: ColumnKernel,
    scale: float,
    softcap: float | None,
    split: dict[str, Any] | None = None,
    *,
    sums: Tensor | None = None,
) -> None:
    seqlen_q, q_heads, head_dim = q.shape[1:]
    seqlen_k, kv_heads = k.shape[1], dk.shape[2]
    heads, kv_block = k.shape[0] * kv_heads, layout.block_size[1]
    split = split or no_split(delta)
    programs = (layout.kv_blocks * heads + split_programs(split)) * (kv_block // (column_kernel.keys or kv_block))
    column_kernel.kernel[(programs,)](
        *(gluon_rows(x, 64, tile_width(head_dim)) for x in (do, q, k, v, dk, dv)),
        lse,
        delta,
        *transposed_arguments(layout),
        **split,
        seqlen_k=seqlen_k,
        q_blocks=layout.q_blocks,
        heads=heads,
        kv_heads=kv_heads,
        group_size=q_heads // k.shape[2],
        pieces=kv_heads // k.shape[2],
        together=backward_heads_together(seqlen_q, head_dim, kv_heads),
        ending=backward_ending(layout.kv_blocks, heads, processors(k.device)),
        scale=scale,
        **score_factors(scale, softcap),
        Q_BLOCK=layout.block_size[0],
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        num_warps=4,
        **column_kernel.others(layout, q, v, sums),
    )


def _start_with_sums(layout: BlockLayout, sums: Tensor, *given: Any) -> None:
    _start(layout, *given, sums=sums)
