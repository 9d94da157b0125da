# SPDX-License-Identifier: Apache-2.0
"""Sums of the rows that tiles of queries add to dk and dv, key by key, always in the same order."""

import triton
import triton.language as tl

from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher


@triton.jit
def _sum_rows(
    p_rows, p_entries, begin, end, first_slab, width, parts,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_D] fp32: columns from FIRST on of the sum over entries begin..end and over parts of a tile."""
    o_d = FIRST + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_R):
        o_r = start + tl.arange(0, BLOCK_R)
        entry = tl.load(p_entries + o_r, mask=o_r < end, other=0)
        row = (first_slab + entry // width).to(tl.int64) * parts * width + entry % width
        for i_part in range(parts):
            p_from = p_rows + (row + i_part * width)[:, None] * D + o_d[None, :]
            rows = tl.load(p_from, mask=(o_r < end)[:, None] & (o_d < D)[None, :], other=0.0)
            acc += tl.sum(rows.to(tl.float32), 0)
    return acc


@triton.jit
def _store_sum(p_row, acc, D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr, ADD: tl.constexpr):
    o_d = FIRST + tl.arange(0, BLOCK_D)
    if ADD:
        acc += tl.load(p_row + o_d, mask=o_d < D, other=0.0)
    tl.store(p_row + o_d, acc.to(p_row.dtype.element_ty), mask=o_d < D)


@kernel_launcher
@triton.jit(do_not_specialize=["keys", "kv_heads", "first_head", "slabs", "width", "parts", "choices"])
def _token_sum_kernel(
    p_rows,  # (kv heads of the launch, slabs, parts, width, D)
    p_sum,  # (M, Hk, D)
    p_entries,  # slab * width + place, by (choice, key); see `entries.py`
    p_begin,  # (choices * M + 1,) int32, where those of each (choice, key) begin
    keys,
    kv_heads,
    first_head,
    slabs,  # tiles times units of a kv head
    width,
    parts,
    choices,  # 1: all kv heads share a list
    D: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADD: tl.constexpr,
):
    key, i_head = tl.program_id(0), tl.program_id(1)
    at = tl.where(choices > 1, i_head, 0) * keys + key
    begin, end = tl.load(p_begin + at), tl.load(p_begin + at + 1)
    p_row = p_sum + (key.to(tl.int64) * kv_heads + first_head + i_head) * D
    first_slab = i_head * slabs
    acc = _sum_rows(p_rows, p_entries, begin, end, first_slab, width, parts, D, D_A, 0, BLOCK_R)
    _store_sum(p_row, acc, D, D_A, 0, ADD)
    if D_B:
        acc = _sum_rows(p_rows, p_entries, begin, end, first_slab, width, parts, D, D_B, D_A, BLOCK_R)
        _store_sum(p_row, acc, D, D_B, D_A, ADD)
