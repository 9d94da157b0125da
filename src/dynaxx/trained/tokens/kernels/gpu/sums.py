# SPDX-License-Identifier: Apache-2.0
"""Sums of the rows that tiles of queries add to dk and dv, key by key, always in the same order."""

import triton
import triton.language as tl

from dynaxx.kernels.primitives.prefetch import prefetched
from dynaxx.kernels.runtime.launcher import kernel_launcher

KEYS_AT_ONCE = 32  # that a program of `_token_sums_kernel` adds


@triton.jit
def _store_sum(p_dk, p_dv, acc, D: tl.constexpr, E: tl.constexpr, FIRST: tl.constexpr, ADD: tl.constexpr):
    """Write columns from FIRST on of a sum: the first D belong to dk, the next E to dv."""
    o_d = FIRST + tl.arange(0, acc.shape[0])
    is_key = o_d < D
    if ADD:
        acc += tl.load(p_dk + o_d, mask=is_key, other=0.0)
    tl.store(p_dk + o_d, acc.to(p_dk.dtype.element_ty), mask=is_key)
    if E:
        is_value = (o_d >= D) & (o_d < D + E)
        if ADD:
            acc += tl.load(p_dv + o_d - D, mask=is_value, other=0.0)
        tl.store(p_dv + o_d - D, acc.to(p_dv.dtype.element_ty), mask=is_value)


@kernel_launcher
@triton.jit(do_not_specialize=["keys", "kv_heads", "first_head", "slabs", "width", "choices"])
def _token_sum_kernel(
    p_rows,  # (kv heads of the launch, slabs, PARTS, width, D + E)
    p_dk,  # (M, Hk, D)
    p_dv,  # (M, Hk, E); unused if E is 0
    p_entries,  # slab * width + place, by (choice, key); see `entries.py`
    p_begin,  # (choices * M + 1,) int32, where those of each (choice, key) begin
    keys,
    kv_heads,
    first_head,
    slabs,  # tiles times units of a kv head
    width,
    choices,  # 1: all kv heads share a list
    D: tl.constexpr,
    E: tl.constexpr,
    W_A: tl.constexpr,  # D + E in two parts, see `primitives.py`
    W_B: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PREFETCH: tl.constexpr,  # rows are loaded so many iterations ahead
    ADD: tl.constexpr,
):
    W: tl.constexpr = D + E
    key, i_head = tl.program_id(0), tl.program_id(1)
    at = tl.where(choices > 1, i_head, 0) * keys + key
    begin, end = tl.load(p_begin + at), tl.load(p_begin + at + 1)
    first_row = i_head.to(tl.int64) * slabs * PARTS * width
    o_r, o_a = tl.arange(0, BLOCK_R), tl.arange(0, W_A)
    acc_a = tl.zeros([BLOCK_R, W_A], tl.float32)
    acc_b = tl.zeros([BLOCK_R, W_B if W_B else 16], tl.float32)
    for start in tl.range(begin, end, BLOCK_R, num_stages=PREFETCH + 1):
        there = start + o_r < end
        entry = tl.load(p_entries + start + o_r, mask=there, other=0)
        for i_part in tl.static_range(PARTS):
            row = entry.to(tl.int64)
            if PARTS > 1:
                row = (entry // width * PARTS + i_part).to(tl.int64) * width + entry % width
            p_from = (p_rows + (first_row + row) * W)[:, None]
            acc_a += tl.load(p_from + o_a[None, :], mask=there[:, None] & (o_a < W)[None, :], other=0.0).to(tl.float32)
            if W_B:
                o_b = W_A + tl.arange(0, W_B)
                rows = tl.load(p_from + o_b[None, :], mask=there[:, None] & (o_b < W)[None, :], other=0.0)
                acc_b += rows.to(tl.float32)
    to = key.to(tl.int64) * kv_heads + first_head + i_head
    _store_sum(p_dk + to * D, p_dv + to * E, tl.sum(acc_a, 0), D, E, 0, ADD)
    if W_B:
        _store_sum(p_dk + to * D, p_dv + to * E, tl.sum(acc_b, 0), D, E, W_A, ADD)


@triton.jit
def _in_order(acc):
    """Return sums whose columns are in the order of `hopper/grouped_rows.py`, in ascending order."""
    parts = tl.reshape(acc, [acc.shape[0], acc.shape[1] // 32, 4, 4, 2])
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), [acc.shape[0], acc.shape[1]])


@triton.jit
def _store_sums(p_dk, p_dv, row, known, acc, D: tl.constexpr, E: tl.constexpr, FIRST: tl.constexpr, ADD: tl.constexpr):
    """Write columns from FIRST on of the sums of several keys: the first D belong to dk, the next E to dv."""
    o_d = FIRST + tl.arange(0, acc.shape[1])
    at, mask = p_dk + (row * D)[:, None] + o_d[None, :], known[:, None] & (o_d < D)[None, :]
    if ADD:
        acc += tl.load(at, mask=mask, other=0.0)
    tl.store(at, acc.to(p_dk.dtype.element_ty), mask=mask)
    if E:
        at, mask = (
            p_dv + (row * E)[:, None] + (o_d - D)[None, :],
            known[:, None] & ((o_d >= D) & (o_d < D + E))[None, :],
        )
        if ADD:
            acc += tl.load(at, mask=mask, other=0.0)
        tl.store(at, acc.to(p_dv.dtype.element_ty), mask=mask)


@kernel_launcher
@triton.jit(do_not_specialize=["keys", "kv_heads", "first_head", "choices", "rows"])
def _token_sums_kernel(
    p_rows,  # (kv heads of the launch, rows, D + E) in 16 bits
    p_dk,
    p_dv,
    p_entries,  # row * KEYS + key in its group, by (choice, group); see `entries.py`
    p_begin,  # (choices * groups + 1,) int32, where those of each (choice, group) begin
    keys,
    kv_heads,
    first_head,
    choices,  # 1: all kv heads share a list
    rows,  # of a kv head
    D: tl.constexpr,
    E: tl.constexpr,
    W_A: tl.constexpr,
    W_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PREFETCH: tl.constexpr,
    ADD: tl.constexpr,
    KEYS: tl.constexpr,
    BY_THREAD: tl.constexpr,  # columns are in the order of `hopper/grouped_rows.py`
):
    """Add the rows of KEYS neighbouring keys, which share their entries, by products with ones and zeros."""
    W: tl.constexpr = D + E
    i_group, i_head = tl.program_id(0), tl.program_id(1)
    p_begin += tl.where(choices > 1, i_head, 0) * tl.num_programs(0) + i_group
    begin, end = tl.load(p_begin), tl.load(p_begin + 1)
    p_rows += i_head.to(tl.int64) * rows * W
    o_r, o_a, o_key = tl.arange(0, BLOCK_R), tl.arange(0, W_A), tl.arange(0, KEYS)
    acc_a = tl.zeros([KEYS, W_A], tl.float32)
    acc_b = tl.zeros([KEYS, W_B if W_B else 16], tl.float32)
    for start in tl.range(begin, end, BLOCK_R, num_stages=PREFETCH + 1):
        there = start + o_r < end
        entry = prefetched(tl.load(p_entries + start + o_r, mask=there, other=0), 1)
        own = (o_key[:, None] == (entry % KEYS)[None, :]) & there[None, :]
        p_from = (p_rows + (entry // KEYS).to(tl.int64) * W)[:, None]
        found = tl.load(p_from + o_a[None, :], mask=there[:, None] & (o_a < W)[None, :], other=0.0)
        found = prefetched(found, PREFETCH)
        acc_a = tl.dot(own.to(found.dtype), found, acc_a)
        if W_B:
            o_b = W_A + tl.arange(0, W_B)
            found = tl.load(p_from + o_b[None, :], mask=there[:, None] & (o_b < W)[None, :], other=0.0)
            found = prefetched(found, PREFETCH)
            acc_b = tl.dot(own.to(found.dtype), found, acc_b)
    key = i_group * KEYS + o_key
    known = key < keys
    row = key.to(tl.int64) * kv_heads + first_head + i_head
    if BY_THREAD:
        acc_a = _in_order(acc_a)
    _store_sums(p_dk, p_dv, row, known, acc_a, D, E, 0, ADD)
    if W_B:
        _store_sums(p_dk, p_dv, row, known, acc_b, D, E, W_A, ADD)
