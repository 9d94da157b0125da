# SPDX-License-Identifier: Apache-2.0
"""Selected attention by key for Hopper, in Gluon; the next tile's rows load while the current tile is written.

    block of keys (resident);  per tile of 64 gathered rows of q: scores -> softmax over this block -> partial, lse

A program holds one block of keys and processes some of the entries that selected it, 64 rows of q at a time. It writes
each row's attention to this block alone. `kernels.nsa.gpu.gather` merges these results and defines names and index.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    commit_group,
    wait_group,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from dynaxx.kernels.attention.hopper.forward_consume import LN2, ROWS
from dynaxx.kernels.compat import barrier, copy_to_shared
from dynaxx.kernels.primitives.hopper.descriptors import LOG2E
from dynaxx.kernels.runtime.arguments import packed_strides_of
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.key_items import Items
from dynaxx.trained.nsa.spans import NsaSpans

WIDE = 64  # columns of v processed together, so that rows are written through 8 KiB of shared memory
REGISTERS = 128  # per thread: allows four programs per multiprocessor, as do their 56 KiB of shared memory


@gluon.jit
def _entries(p_entries, first, end, row, GROUP: gl.constexpr):
    """Return the entry of each row of the tile that begins at place `first`; past the end, repeat the last one."""
    return gl.load(p_entries + gl.minimum(first + row // GROUP, end - 1))


@gluon.jit
def _fetch(
    q_shared, p_q, entry, row, i_head, PER_QUERY: gl.constexpr, strides, column, GROUP: gl.constexpr
):  # fmt: skip
    """Start copying [64, D] rows of q."""
    offsets = (entry // PER_QUERY).to(gl.int64) * strides.n + (i_head * GROUP + row % GROUP) * strides.h
    copy_to_shared(q_shared, p_q + (offsets[:, None] + column[None, :]))
    commit_group()


@gluon.jit
def _put(p_partial, acc, share, row_offset, inside, first_column, D: gl.constexpr, layout: gl.constexpr):
    """Write WIDE columns of a tile."""
    WIDE: gl.constexpr = acc.shape[1]
    column = first_column + gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    share = gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))
    out = gl.convert_layout((acc * share[:, None]).to(p_partial.dtype.element_ty), layout)
    offsets = gl.convert_layout(row_offset, gl.SliceLayout(1, layout))
    inside = gl.convert_layout(inside, gl.SliceLayout(1, layout))
    gl.store(p_partial + (offsets[:, None] + column[None, :]), out, mask=inside[:, None] & (column >= 0)[None, :])


@gluon.jit
def _block(p_x, start, keys, stride, SIZE: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """Load [SIZE, D] rows of one head, zero past the last key."""
    row = start + gl.arange(0, SIZE, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    offsets = row.to(gl.int64)[:, None] * stride + column[None, :]
    return gl.load(p_x + offsets, mask=(row < keys)[:, None] & (column >= 0)[None, :], other=0.0)


@kernel_launcher
@gluon.jit(do_not_specialize=["blocks", "heads", "heads_per_kv", "first_entry", "keys"])
def _selected_hopper_partial_kernel(
    p_q, p_k, p_v,
    p_partial,  # (entries of these queries, group, D) contiguous
    p_partial_lse,  # (entries of these queries, group) fp32
    items,  # `ItemTables`
    p_taken,  # (1,) int32, not 0 if out and lse are computed already; read only if CHOSEN
    blocks, heads, heads_per_kv, first_entry, keys, scale_log2,
    q_strides, k_strides, v_strides,
    D: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr,
    PER_QUERY: gl.constexpr,  # entries per query
    CHOSEN: gl.constexpr,
    WIDE: gl.constexpr,  # columns of v processed together
):  # fmt: skip
    STEP: gl.constexpr = ROWS // GROUP
    i_item = gl.program_id(0)
    cell = gl.minimum(gl.load(items.p_cell + i_item), blocks * heads - 1)
    i_head = cell // blocks
    start = gl.load(items.p_block_start + cell % blocks)
    begin, end = gl.load(items.p_begin + i_item), gl.load(items.p_end + i_item)
    if CHOSEN:
        end = gl.where(gl.load(p_taken) != 0, begin, end)
    if begin < end:
        dtype: gl.constexpr = p_q.dtype.element_ty
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_BLOCK, 16])
        acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
        p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
        rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
        shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, rows_layout))
        column = gl.arange(0, D, gl.SliceLayout(0, rows_layout))
        s_row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        s_column = gl.arange(0, KV_BLOCK, gl.SliceLayout(0, s_layout))
        q_shared = gl.allocate_shared_memory(dtype, [ROWS, D], shared)
        entry = _entries(items.p_entries, begin, end, row, GROUP)
        _fetch(q_shared, p_q, entry, row, i_head, PER_QUERY, q_strides, column, GROUP)
        i_hk = (i_head // heads_per_kv).to(gl.int64)
        p_k += i_hk * k_strides.h
        p_v += i_hk * v_strides.h
        b_k = _block(p_k, start, keys, k_strides.n, KV_BLOCK, D, rows_layout)
        k_shared = gl.allocate_shared_memory(dtype, [KV_BLOCK, D], shared, b_k)
        b_v = _block(p_v, start, keys, v_strides.n, KV_BLOCK, WIDE, out_layout)
        v_shared = gl.allocate_shared_memory(dtype, [KV_BLOCK, WIDE], shared, b_v)
        if D > WIDE:
            b_v = _block(p_v + WIDE, start, keys, v_strides.n, KV_BLOCK, WIDE, out_layout)
            v_right = gl.allocate_shared_memory(dtype, [KV_BLOCK, WIDE], shared, b_v)
        s_zero = gl.zeros([ROWS, KV_BLOCK], gl.float32, s_layout)
        zero = gl.zeros([ROWS, WIDE], gl.float32, acc_layout)
        entry = _entries(items.p_entries, begin + STEP, end, row, GROUP)
        near = True  # whether queries may lie inside this block; entries ascend, so once False it stays False
        for first in range(begin, end, STEP):
            wait_group(0)
            fence_async_shared()
            barrier()
            s_token = warpgroup_mma(q_shared, k_shared.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            s_entry = _entries(items.p_entries, first, end, s_row, GROUP)
            after = _entries(items.p_entries, first + 2 * STEP, end, row, GROUP)
            scores = warpgroup_mma_wait(0, deps=[s_token])
            barrier()
            _fetch(q_shared, p_q, entry, row, i_head, PER_QUERY, q_strides, column, GROUP)
            entry = after
            if near:
                last_key = gl.load(items.p_last_key + s_entry // PER_QUERY)
                scores = gl.where((start + s_column)[None, :] <= last_key[:, None], scores, -float("inf"))
                near = gl.min(last_key, 0) < start + KV_BLOCK - 1
            row_max = gl.max(scores, 1) * scale_log2
            shift = gl.where(row_max == -float("inf"), 0.0, row_max)
            weights = gl.exp2(scores * scale_log2 - shift[:, None])
            p = gl.convert_layout(weights.to(dtype), p_layout)
            left_token = warpgroup_mma(p, v_shared, zero, use_acc=False, is_async=True)
            if D > WIDE:
                right_token = warpgroup_mma(p, v_right, zero, use_acc=False, is_async=True)
            row_sum = gl.sum(weights, 1)
            hidden = row_sum == 0
            row_sum = gl.where(hidden, 1.0, row_sum)
            lse = gl.where(hidden, -float("inf"), (row_max + gl.log2(row_sum)) * LN2)
            place = (s_entry - first_entry).to(gl.int64) * GROUP + s_row % GROUP
            inside = first + s_row // GROUP < end
            gl.store(p_partial_lse + place, lse, mask=inside)
            share = 1.0 / row_sum
            if D > WIDE:
                acc = warpgroup_mma_wait(1, deps=[left_token])
                _put(p_partial, acc, share, place * D, inside, 0, D, out_layout)
                acc = warpgroup_mma_wait(0, deps=[right_token])
                _put(p_partial, acc, share, place * D, inside, WIDE, D, out_layout)
            else:
                acc = warpgroup_mma_wait(0, deps=[left_token])
                _put(p_partial, acc, share, place * D, inside, 0, D, out_layout)
        wait_group(0)


def partials(
    q: Tensor, k: Tensor, v: Tensor, partial: Tensor, partial_lse: Tensor, index: Items, chunk: int, slots: int,
    heads: int, first_entry: int, spans: NsaSpans, scale: float, taken: Tensor | None,
) -> None:  # fmt: skip
    """Write the partial results of a chunk of queries."""
    _selected_hopper_partial_kernel[(index.cell.shape[1],)](
        q,
        k,
        v,
        partial,
        partial_lse,
        index.tables(chunk, spans),
        index.entries if taken is None else taken,
        blocks=len(spans.block_start),
        heads=heads,
        heads_per_kv=heads // k.shape[1],
        first_entry=first_entry,
        keys=k.shape[0],
        scale_log2=scale * LOG2E,
        q_strides=packed_strides_of(q),
        k_strides=packed_strides_of(k),
        v_strides=packed_strides_of(v),
        D=q.shape[2],
        GROUP=q.shape[1] // heads,
        KV_BLOCK=spans.sizes.slc_block,
        PER_QUERY=heads * slots,
        CHOSEN=taken is not None,
        WIDE=min(q.shape[2], WIDE),
        num_warps=4,
        maxnreg=REGISTERS,
    )
