# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the kernels over chosen tokens: rows of a tile, lists of keys, rows that lie anywhere, and scores.

    tile      PER_TILE neighbouring queries x up to PART q heads of a unit; row r is query r // PART, head r % PART
    list      blocks of GRAIN keys that the tile's queries chose, each once, with a bit per query (`marks`)

Rows are cut into a part whose width is a power of two and a rest (576 = 512 + 64), so that latent attention wastes no
half of a tile. D / E head_dim of q and k, and of v; _A and _B are widths of the two parts, B = 0 for no rest.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dynaxx.kernels.primitives.numbers import exp_rounded, tanh
from dynaxx.kernels.primitives.prefetch import prefetched


class ListTables(NamedTuple):
    """The tensors of a `TokenPlan` as one kernel argument."""

    p_lists: Any  # (tiles, Hs, slots) int32 contiguous: blocks
    p_marks: Any  # the same: a bit per query of the tile
    p_counts: Any  # (tiles, Hs) int32: entries of each list
    p_tiles: Any  # (tiles, 2) int32: first query, number of queries
    p_position: Any  # (T,) int32, of each query among the keys of its sequence
    p_first_key: Any  # (T,) int32, row of the first key of its sequence


class QueryRows(NamedTuple):
    """The rows of a tile, [rows] each."""

    t: Any  # query
    head: Any  # q head
    place: Any  # of the query in its tile
    inside: Any  # whether the row exists


class TileList(NamedTuple):
    """The list of a tile."""

    p_blocks: Any
    p_marks: Any
    count: Any  # entries
    first_key: Any  # row of the first key of the sequence


@triton.jit
def tile_rows(p_tiles, i_tile, i_unit, i_part, group_size, PART: tl.constexpr, ROWS: tl.constexpr, BOTH: tl.constexpr):
    """Return the rows of BOTH // ROWS neighbouring parts of a tile."""
    PARTS: tl.constexpr = BOTH // ROWS
    first, count = tl.load(p_tiles + 2 * i_tile), tl.load(p_tiles + 2 * i_tile + 1)
    o_row = tl.arange(0, BOTH)
    place, member = o_row % ROWS // PART, (i_part * PARTS + o_row // ROWS) * PART + o_row % PART
    inside = (place < count) & (member < group_size)
    t, head = (first + place).to(tl.int64), (i_unit * group_size + member).to(tl.int64)
    return QueryRows(t=t, head=head, place=place, inside=inside)


@triton.jit
def tile_list(lists, i_tile, i_unit, units, select_heads, slots, PER_TILE: tl.constexpr):
    """Return the list of a tile."""
    i_list = i_tile.to(tl.int64) * select_heads + i_unit * select_heads // units
    first_key = tl.load(lists.p_first_key + tl.load(lists.p_tiles + 2 * i_tile)).to(tl.int64)
    count = slots
    if PER_TILE > 1:
        count = tl.load(lists.p_counts + i_list)
    p_blocks, p_marks = lists.p_lists + i_list * slots, lists.p_marks + i_list * slots
    return TileList(p_blocks=p_blocks, p_marks=p_marks, count=count, first_key=first_key)


@triton.jit
def gradient_slab(i_tile, tiles, i_unit, own_units, parts, i_part):
    """Return the place of a part of a tile in (kv heads, tiles, units of a kv head, parts)."""
    slab = (i_unit // own_units * tiles + i_tile) * own_units + i_unit % own_units
    return slab.to(tl.int64) * parts + i_part


@triton.jit
def list_entries(p_list, p_marks, first, count, GRAIN: tl.constexpr, PER_TILE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return blocks [BLOCK_N] of a list, for each key from place `first` on, and their marks."""
    slot = (first + tl.arange(0, BLOCK_N)) // GRAIN
    block = tl.load(p_list + slot, mask=slot < count, other=-1)
    marks = block
    if PER_TILE > 1:
        marks = tl.load(p_marks + slot, mask=slot < count, other=0).to(tl.int32)
    return block, marks


@triton.jit
def keys_of(block, first, last, GRAIN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return keys [BLOCK_N] of blocks of `list_entries`, and which are there up to position `last`."""
    key = block * GRAIN + (first + tl.arange(0, BLOCK_N)) % GRAIN
    there = (block >= 0) & (block <= last) & (key <= last)  # a product that overflows is none
    return tl.where(there, key, 0), there


@triton.jit
def listed_keys(p_list, first, count, last, GRAIN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return keys [BLOCK_N] of a list from place `first` on, and which are there up to position `last`."""
    block, _ = list_entries(p_list, p_list, first, count, GRAIN, 1, BLOCK_N)
    return keys_of(block, first, last, GRAIN, BLOCK_N)


@triton.jit
def visible_pairs(key, there, marks, place, position, PER_TILE: tl.constexpr, GRAIN: tl.constexpr):
    """Return which keys each row of a tile sees, [ROWS, BLOCK_N]; with one query per tile, [1, BLOCK_N]."""
    visible = there[None, :]
    if PER_TILE > 1:
        visible = visible & (((marks[None, :] >> place[:, None]) & 1) != 0)
        if GRAIN > 1:
            visible = visible & (key[None, :] <= position[:, None])
    return visible


@triton.jit
def row_parts(p_rows, mask, D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, PREFETCH: tl.constexpr = 0):
    """Return rows of pointers [R] as tiles [R, D_A] and [R, max(D_B, 16)]; zeros where masked and behind D.

    In a loop, PREFETCH > 0 starts the loads so many iterations ahead.
    """
    o_a = tl.arange(0, D_A)
    within = mask[:, None] if D >= D_A else mask[:, None] & (o_a < D)[None, :]
    b_a = tl.load(p_rows[:, None] + o_a[None, :], mask=within, other=0.0)
    if PREFETCH:
        b_a = prefetched(b_a, PREFETCH)
    if D_B:
        o_b = D_A + tl.arange(0, D_B)
        within = mask[:, None] if D == D_A + D_B else mask[:, None] & (o_b < D)[None, :]
        b_b = tl.load(p_rows[:, None] + o_b[None, :], mask=within, other=0.0)
        if PREFETCH:
            b_b = prefetched(b_b, PREFETCH)
    else:
        b_b = b_a
    return b_a, b_b


@triton.jit
def key_value_parts(
    p_k, p_v, row, there, k_strides, v_strides, D: tl.constexpr, E: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr,
    E_A: tl.constexpr, E_B: tl.constexpr, LATENT: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Return `row_parts` of keys and of values; if LATENT, values are the first part of the keys."""
    k_a, k_b = row_parts(p_k + row * k_strides.n, there, D, D_A, D_B, PREFETCH)
    if LATENT:
        v_a, v_b = k_a, k_b
    else:
        v_a, v_b = row_parts(p_v + row * v_strides.n, there, E, E_A, E_B, PREFETCH)
    return k_a, k_b, v_a, v_b


@triton.jit
def products(b_a, b_b, c_a, c_b, D_B: tl.constexpr):
    """Return [M, N]: rows of b [M, D] times rows of c [N, D]."""
    result = tl.dot(b_a, tl.trans(c_a), input_precision="ieee")
    if D_B:
        result = tl.dot(b_b, tl.trans(c_b), result, input_precision="ieee")
    return result


@triton.jit
def capped(scores, softcap, CAPPED: tl.constexpr):
    """Return scores, and the slope of the cap at them."""
    if CAPPED:
        inner = tanh(scores / softcap)
        return inner * softcap, 1.0 - inner * inner
    else:
        return scores, 1.0


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """Return exp(x) for x <= 0: rounded well, or by the GPU's own instruction, which is enough for 16-bit weights."""
    if EXACT:
        return exp_rounded(x)
    else:
        return tl.exp(x)


@triton.jit
def store_parts(p_rows, mask, b_a, b_b, D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr):
    """Write tiles of `row_parts` to rows of pointers [R]."""
    o_a = tl.arange(0, D_A)
    element = p_rows.dtype.element_ty
    within = mask[:, None] if D >= D_A else mask[:, None] & (o_a < D)[None, :]
    tl.store(p_rows[:, None] + o_a[None, :], b_a.to(element), mask=within)
    if D_B:
        o_b = D_A + tl.arange(0, D_B)
        within = mask[:, None] if D == D_A + D_B else mask[:, None] & (o_b < D)[None, :]
        tl.store(p_rows[:, None] + o_b[None, :], b_b.to(element), mask=within)
