# SPDX-License-Identifier: Apache-2.0
"""Selected attention by key.

A program holds one block of keys and gathers the queries that selected it; a second kernel merges the partial results
of each query. Each row of q is read once per selected block, so groups of any size fill a tile.

    block of keys -> its entries (query, slot), in items -> partial out, lse per entry -> merged out, lse per query

Legend: T queries, M keys; Hq, Hk, Hs query, kv and selection heads; n slots; C blocks; D head_dim of q and k, E
head_dim of v. Entry (t, hs, slot) has number (t * Hs + hs) * n + slot. A tile has ROWS rows and ROWS / GROUP entries,
where GROUP is the group size as a power of two.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.arguments import packed_strides_of
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.config import KeyTiles
from dynaxx.trained.nsa.kernels.gpu.key_items import Items
from dynaxx.trained.nsa.kernels.gpu.rows import block_rows, gather_rows, scatter_rows, softmax_step
from dynaxx.trained.nsa.spans import NsaSpans

RUNTIME_SIZES = ["blocks", "heads", "slots", "keys", "group_size", "heads_per_kv", "first_entry", "queries"]


@triton.jit
def item_block(items, i_item, blocks, heads):
    """Return selection head and first key row of an item's block; of an arbitrary block for an empty item."""
    cell = tl.minimum(tl.load(items.p_cell + i_item), blocks * heads - 1)
    return (cell // blocks).to(tl.int64), tl.load(items.p_block_start + cell % blocks)


@triton.jit
def entry_rows(p_entries, first, end, i_head, heads, slots, group_size, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return entry, query row, q head and validity of the rows that begin at place `first`, each [ROWS]."""
    o_row = tl.arange(0, ROWS)
    place, member = first + o_row // GROUP, o_row % GROUP
    inside = (place < end) & (member < group_size)
    entry = tl.load(p_entries + place, mask=inside, other=0)
    return entry, entry // (heads * slots), i_head.to(tl.int32) * group_size + member, inside


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _selected_partial_kernel(
    p_q,
    p_k,
    p_v,
    p_partial,  # (entries of these queries, group, E) contiguous
    p_partial_lse,  # (entries of these queries, group) fp32
    items,  # `ItemTables`
    p_taken,  # (1,) int32, not 0 if out and lse are computed already; read only if CHOSEN
    blocks,
    heads,
    slots,
    keys,
    group_size,
    heads_per_kv,
    first_entry,
    scale,  # > 0
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
    CHOSEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    SPLIT: tl.constexpr = KV_BLOCK // BLOCK_N
    STEP: tl.constexpr = ROWS // GROUP
    i_item = tl.program_id(0)
    i_head, start = item_block(items, i_item, blocks, heads)
    begin, end = tl.load(items.p_begin + i_item), tl.load(items.p_end + i_item)
    if CHOSEN:
        end = tl.where(tl.load(p_taken) != 0, begin, end)
    p_k += i_head // heads_per_kv * k_strides.h
    p_v += i_head // heads_per_kv * v_strides.h
    if SPLIT == 1:
        b_k = block_rows(p_k, start, keys, k_strides.n, D, BLOCK_D, BLOCK_N)
        b_v = block_rows(p_v, start, keys, v_strides.n, E, BLOCK_E, BLOCK_N)
    for first in range(begin, end, STEP):
        entry, t, h, inside = entry_rows(items.p_entries, first, end, i_head, heads, slots, group_size, GROUP, ROWS)
        last_key = tl.load(items.p_last_key + t, mask=inside, other=-1)
        b_q = gather_rows(p_q, t, h, q_strides, inside, D, BLOCK_D)
        acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        for i_part in tl.static_range(SPLIT):
            from_key = start + i_part * BLOCK_N
            if SPLIT > 1:
                b_k = block_rows(p_k, from_key, keys, k_strides.n, D, BLOCK_D, BLOCK_N)
                b_v = block_rows(p_v, from_key, keys, v_strides.n, E, BLOCK_E, BLOCK_N)
            scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            visible = (from_key + tl.arange(0, BLOCK_N))[None, :] <= last_key[:, None]
            scores = tl.where(visible, scores, float("-inf"))
            row_max, rescale, weights = softmax_step(scores, row_max, scale, b_k.dtype == tl.float32)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=PRECISION)
        empty = row_sum == 0
        row_sum = tl.where(empty, 1.0, row_sum)
        lse = tl.where(empty, float("-inf"), row_max * scale + tl.log(row_sum))
        place, member = entry - first_entry, tl.arange(0, ROWS) % GROUP
        tl.store(p_partial_lse + place.to(tl.int64) * group_size + member, lse, mask=inside)
        scatter_rows(p_partial, acc / row_sum[:, None], place, member, (group_size * E, E), inside, E, BLOCK_E)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _selected_merge_kernel(
    p_partial,
    p_partial_lse,  # -inf for entries without a result
    p_out,  # (T, Hq, E)
    p_lse,  # (Hq, T) contiguous
    p_taken,
    first_entry,
    queries,
    q_heads,
    slots,
    rows,  # number of (t, q head) pairs of these queries
    group_size,
    out_strides,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Merge the partial results of each query and q head."""
    heads = q_heads // group_size
    if CHOSEN:
        rows = tl.where(tl.load(p_taken) == 0, rows, 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    h = row % q_heads
    base = row // q_heads * heads + h // group_size  # (t, selection head)
    p_row = p_partial_lse + base.to(tl.int64) * slots * group_size + h % group_size
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for slot in range(0, slots):
        row_max = tl.maximum(row_max, tl.load(p_row + slot * group_size, mask=inside, other=float("-inf")))
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for slot in range(0, slots):
        part = tl.load(p_row + slot * group_size, mask=inside, other=float("-inf"))
        weight = tl.exp(part - shift)
        row_sum += weight
        b_out = gather_rows(
            p_partial, base * slots + slot, h % group_size, (group_size * E, E), part > float("-inf"), E, BLOCK_E
        )
        acc += weight[:, None] * b_out.to(tl.float32)
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    t = first_entry // (heads * slots) + row // q_heads
    lse = tl.where(empty, float("-inf"), row_max + tl.log(row_sum))
    tl.store(p_lse + h.to(tl.int64) * queries + t, lse, mask=inside)
    scatter_rows(p_out, acc / row_sum[:, None], t, h, out_strides, inside, E, BLOCK_E)


def forward_chunk(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, index: Items, chunk: int, slots: int,
    heads: int, spans: NsaSpans, tiles: KeyTiles, scale: float, taken: Tensor | None = None,
    partials: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """Attend for a chunk of queries and write their rows of out (T, Hq, E) and lse (Hq, T); scale > 0.

    Write nothing if `taken`, (1,) int32 on the device, is not 0. `partials`, if given, replaces this file's kernel for
    partial results.
    """
    queries, group_size = index.queries(chunk, q.shape[0]), q.shape[1] // heads
    count = queries.stop - queries.start
    partial = q.new_empty(count * heads * slots, group_size, v.shape[2])
    partial_lse = torch.full(partial.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    first_entry = queries.start * heads * slots
    if partials is not None:
        partials(q, k, v, partial, partial_lse, index, chunk, slots, heads, first_entry, spans, scale, taken)
    else:
        _selected_partial_kernel[(index.cell.shape[1],)](
            q,
            k,
            v,
            partial,
            partial_lse,
            **item_arguments(q, k, v, index, chunk, heads, slots, spans),
            p_taken=index.entries if taken is None else taken,
            first_entry=first_entry,
            scale=scale,
            CHOSEN=taken is not None,
            GROUP=tiles.group,
            ROWS=tiles.rows,
            BLOCK_N=min(tiles.block_n, spans.sizes.slc_block),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    rows, block = count * q.shape[1], 16
    _selected_merge_kernel[(-(-rows // block),)](
        partial,
        partial_lse,
        out,
        lse,
        p_taken=index.entries if taken is None else taken,
        first_entry=first_entry,
        queries=q.shape[0],
        q_heads=q.shape[1],
        slots=slots,
        rows=rows,
        group_size=group_size,
        out_strides=packed_strides_of(out),
        E=v.shape[2],
        BLOCK_E=padded(v.shape[2]),
        ROWS=block,
        CHOSEN=taken is not None,
        num_warps=4,
    )


def item_arguments(
    q: Tensor, k: Tensor, v: Tensor, index: Items, chunk: int, heads: int, slots: int, spans: NsaSpans
) -> dict[str, object]:
    """Return the kernel arguments for the tensors and the index that all kernels by key share."""
    return {
        "items": index.tables(chunk, spans),
        "blocks": len(spans.block_start),
        "heads": heads,
        "slots": slots,
        "keys": k.shape[0],
        "group_size": q.shape[1] // heads,
        "heads_per_kv": heads // k.shape[1],
        "q_strides": packed_strides_of(q),
        "k_strides": packed_strides_of(k),
        "v_strides": packed_strides_of(v),
        "D": q.shape[2],
        "E": v.shape[2],
        "BLOCK_D": padded(q.shape[2]),
        "BLOCK_E": padded(v.shape[2]),
        "KV_BLOCK": spans.sizes.slc_block,
        "PRECISION": "ieee",
    }
