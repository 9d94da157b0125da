# SPDX-License-Identifier: Apache-2.0
"""Gradients of selected attention by key.

    block of keys -> its entries (query, slot), in items -> dk, dv per item, partial dq per entry -> `nsa.sums`

Each program computes dk and dv of one item and, if WITH_DQ, the partial dq of its entries. Names and shapes are those
of `nsa.gather`.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.arguments import packed_strides_of
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.config import KeyTiles
from dynaxx.trained.nsa.kernels.gpu.gather import RUNTIME_SIZES, entry_rows, item_arguments, item_block
from dynaxx.trained.nsa.kernels.gpu.key_items import Items
from dynaxx.trained.nsa.kernels.gpu.rows import block_rows, gather_rows, row_values, scatter_rows, weights_of
from dynaxx.trained.nsa.kernels.gpu.sums import sum_entries, sum_items
from dynaxx.trained.nsa.spans import NsaSpans

SEGMENT_TILES = tl.constexpr(8)  # tiles per partial sum in fp32


@triton.jit
def _add_product(acc, a, b, PRECISION: tl.constexpr):
    """Return acc + a @ b. In fp32, sum the product separately, because one chain of additions rounds more often."""
    if a.dtype == tl.float32:
        acc = acc - tl.dot(-a, b, input_precision=PRECISION)  # an addition would be merged into one chain again
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _accumulate_rows(
    dk,  # [BLOCK_N, BLOCK_D] fp32
    dv,  # [BLOCK_N, BLOCK_E] fp32
    b_k,
    b_v,
    from_key,
    i_part,
    i_head,
    begin,
    end,
    p_do,
    p_q,
    p_rows,
    p_dq,
    items,
    heads,
    slots,
    group_size,
    first_entry,
    scale,
    do_strides,
    q_strides,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WITH_DQ: tl.constexpr,
):
    """Add the contributions of the entries at places begin .. end - 1."""
    STEP: tl.constexpr = ROWS // GROUP
    o_n = tl.arange(0, BLOCK_N)
    for first in range(begin, end, STEP):
        entry, t, h, inside = entry_rows(items.p_entries, first, end, i_head, heads, slots, group_size, GROUP, ROWS)
        b_q = gather_rows(p_q, t, h, q_strides, inside, D, BLOCK_D)
        b_do = gather_rows(p_do, t, h, do_strides, inside, E, BLOCK_E)
        lse, delta = row_values(p_rows, t * (heads * group_size) + h, inside)
        scores = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BLOCK_N, ROWS]
        weights = weights_of(scores, lse[None, :], scale, b_k.dtype == tl.float32)
        nearest = tl.load(
            items.p_last_key + tl.load(items.p_entries + first) // (heads * slots)
        )  # entries ascend by query
        if nearest < from_key + BLOCK_N - 1:
            place = first + tl.arange(0, ROWS) // GROUP  # reload in this layout, so that no iteration has to keep it
            entry_again = tl.load(items.p_entries + place, mask=place < end, other=0, volatile=True)
            last_key = tl.load(items.p_last_key + entry_again // (heads * slots))
            weights = tl.where((from_key + o_n)[:, None] <= last_key[None, :], weights, 0.0)
        dv = _add_product(dv, weights.to(b_do.dtype), b_do, PRECISION)
        dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        ds = (weights * (dp - delta[None, :])).to(b_q.dtype)
        dk = _add_product(dk, ds, b_q, PRECISION)
        if WITH_DQ:
            dq = tl.dot(tl.trans(ds), b_k, input_precision=PRECISION)  # [ROWS, BLOCK_D]
            place = (entry - first_entry).to(tl.int64) * SPLIT + i_part
            member = tl.arange(0, ROWS) % GROUP
            scatter_rows(p_dq, dq * scale, place, member, (group_size * D, D), inside, D, BLOCK_D)
    return dk, dv


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _selected_bwd_dkv_kernel(
    p_do,
    p_q,
    p_k,
    p_v,
    p_rows,  # (T, Hq, 2) from `row_pairs`
    p_dq,  # (entries of these queries, SPLIT, group, D) contiguous; written only if WITH_DQ
    p_dk,  # (items, KV_BLOCK, D) fp32
    p_dv,  # (items, KV_BLOCK, E) fp32
    items,  # `ItemTables`
    blocks,
    heads,
    slots,
    keys,
    group_size,
    heads_per_kv,
    first_entry,
    scale,
    do_strides,
    q_strides,
    k_strides,
    v_strides,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WITH_DQ: tl.constexpr,
):
    SPLIT: tl.constexpr = KV_BLOCK // BLOCK_N
    EXACT: tl.constexpr = p_q.dtype.element_ty == tl.float32
    SEGMENT: tl.constexpr = SEGMENT_TILES * (ROWS // GROUP)
    i_item, i_part = tl.program_id(0), tl.program_id(1)
    i_head, start = item_block(items, i_item, blocks, heads)
    begin, end = tl.load(items.p_begin + i_item), tl.load(items.p_end + i_item)
    from_key = start + i_part * BLOCK_N
    o_n = tl.arange(0, BLOCK_N)
    b_k = block_rows(p_k + i_head // heads_per_kv * k_strides.h, from_key, keys, k_strides.n, D, BLOCK_D, BLOCK_N)
    b_v = block_rows(p_v + i_head // heads_per_kv * v_strides.h, from_key, keys, v_strides.n, E, BLOCK_E, BLOCK_N)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    if EXACT:  # fp32 is precise enough only in short partial sums
        for first in range(begin, end, SEGMENT):
            some_dk, some_dv = _accumulate_rows(
                tl.zeros_like(dk), tl.zeros_like(dv), b_k, b_v, from_key, i_part, i_head, first,
                tl.minimum(first + SEGMENT, end), p_do, p_q, p_rows, p_dq, items,
                heads, slots, group_size, first_entry, scale, do_strides, q_strides,
                D, E, BLOCK_D, BLOCK_E, SPLIT, GROUP, ROWS, BLOCK_N, PRECISION, WITH_DQ,
            )  # fmt: skip
            dk += some_dk
            dv += some_dv
    else:
        dk, dv = _accumulate_rows(
            dk, dv, b_k, b_v, from_key, i_part, i_head, begin,
            end, p_do, p_q, p_rows, p_dq, items,
            heads, slots, group_size, first_entry, scale, do_strides, q_strides,
            D, E, BLOCK_D, BLOCK_E, SPLIT, GROUP, ROWS, BLOCK_N, PRECISION, WITH_DQ,
        )  # fmt: skip
    row = i_item.to(tl.int64) * KV_BLOCK + i_part * BLOCK_N + o_n
    every = o_n >= 0
    scatter_rows(p_dk, dk * scale, row, o_n, (D, 0), every, D, BLOCK_D)
    scatter_rows(p_dv, dv, row, o_n, (E, 0), every, E, BLOCK_E)


def backward_chunk(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor,
    grads: tuple[Tensor | None, Tensor, Tensor], index: Items, chunk: int, indices: Tensor, spans: NsaSpans,
    tiles: KeyTiles, scale: float, items_dkv: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """Write the contributions of a chunk of queries to dk and dv (added after the first chunk), and to dq unless None.

    `items_dkv`, if given, replaces this file's kernel for dk and dv; it supports a single chunk only.
    """
    dq, dk, dv = grads
    heads, slots = indices.shape[1:]
    queries, group_size = index.queries(chunk, q.shape[0]), q.shape[1] // heads
    count, max_items = queries.stop - queries.start, index.cell.shape[1]
    size, block_n = spans.sizes.slc_block, min(tiles.block_n, spans.sizes.slc_block)
    split = size // block_n
    items_dk, items_dv = (rows.new_empty(max_items, size, x.shape[2]) for x in (q, v))
    entries_dq = q.new_empty((count * heads * slots, split, group_size, q.shape[2]) if dq is not None else (1,))
    if items_dkv is not None:
        items_dkv(do, q, k, v, rows, index, slots, spans, (items_dk, items_dv), scale)
    else:
        _selected_bwd_dkv_kernel[(max_items, split)](
            do,
            q,
            k,
            v,
            rows,
            entries_dq,
            items_dk,
            items_dv,
            **item_arguments(q, k, v, index, chunk, heads, slots, spans),
            first_entry=queries.start * heads * slots,
            scale=scale,
            do_strides=packed_strides_of(do),
            GROUP=tiles.group,
            ROWS=tiles.rows,
            BLOCK_N=block_n,
            WITH_DQ=dq is not None,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    sum_items(items_dk, dk, index, chunk, heads, spans)
    sum_items(items_dv, dv, index, chunk, heads, spans)
    if dq is not None:
        sum_entries(entries_dq, dq, indices, queries, spans)
