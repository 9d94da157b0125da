# SPDX-License-Identifier: Apache-2.0
"""Scores of the pages of a list: products of their summaries with the queries of a step.

    queries -> sums of max(q, 0), min(q, 0) -> parts for the matrix unit;  low, high of each page -> products -> scores

Legend: R rows of q, D head_dim, P logical pages.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dynaxx.kernels.decode.triton.pages import physical_pages
from dynaxx.kernels.primitives.triton.conversion import nearest, power_below

FEW_ROWS = tl.constexpr(16)


class ListQueries(NamedTuple):
    """The queries of a list."""

    p_q: Any  # the first row
    strides: Any  # `Strides`
    rows: Any
    group_size: Any
    scale: Any


class Summaries(NamedTuple):
    """The summaries of pages."""

    p_low: Any
    p_high: Any
    p_scale: Any
    strides: Any  # `RowStrides`
    scale_strides: Any


class ScoreSizes(NamedTuple):
    """Constants of `score_pages`."""

    PAGED: Any
    SCALED: Any
    MEAN: Any  # low and high are equal
    DOT: Any  # multiply on the matrix unit
    D: Any
    BLOCK_D: Any
    BLOCK_R: Any  # rows at once
    TILE: Any  # pages at once
    STAGES: Any
    FETCH: Any  # prefetch the first tile to L2 while the digits of the queries are computed


@triton.jit
def _query_bounds(queries, sizes: tl.constexpr):
    """Return the sums over a list's queries of max(q, 0) and of min(q, 0), each [BLOCK_D]."""
    D: tl.constexpr = sizes.D
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    BLOCK_R: tl.constexpr = sizes.BLOCK_R
    p_q, strides, rows, group_size, scale = queries
    o_d, o_r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    up = tl.zeros([BLOCK_D], tl.float32)
    down = tl.zeros([BLOCK_D], tl.float32)
    if BLOCK_R <= FEW_ROWS:  # one row after another, so that threads need not exchange data
        for row in tl.static_range(BLOCK_R):
            p_row = p_q + (row // group_size).to(tl.int64) * strides.n + (row % group_size).to(tl.int64) * strides.h
            b_row = tl.load(p_row + o_d, mask=o_d < tl.where(row < rows, D, 0), other=0.0).to(tl.float32) * scale
            up += tl.maximum(b_row, 0.0)
            down += tl.minimum(b_row, 0.0)
    else:
        for start in range(0, rows, BLOCK_R):
            row = start + o_r
            p_row = p_q + (row // group_size).to(tl.int64) * strides.n + (row % group_size).to(tl.int64) * strides.h
            mask = (row < rows)[:, None] & (o_d < D)[None, :]
            b_q = tl.load(p_row[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32) * scale
            up += tl.sum(tl.maximum(b_q, 0.0), 0)
            down += tl.sum(tl.minimum(b_q, 0.0), 0)
    return up, down


@triton.jit
def _thirds(x):
    """Return [len(x), 16] bf16: three values that add up to each fp32 value, then zeros."""
    o_c = tl.arange(0, 16)[None, :]
    first = x.to(tl.bfloat16).to(tl.float32)
    second = (x - first).to(tl.bfloat16).to(tl.float32)
    third = x - first - second
    columns = tl.where(o_c == 0, first[:, None], tl.where(o_c == 1, second[:, None], third[:, None]))
    return tl.where(o_c < 3, columns, 0.0).to(tl.bfloat16)


@triton.jit
def _digits(x):
    """Return [len(x), 16] int8: values in (-2, 2) as three digits to base 128, the first worth 1 / 32; then zeros."""
    o_c = tl.arange(0, 16)
    y = x[:, None] * tl.where(o_c == 0, 2.0**5, tl.where(o_c == 1, 2.0**12, tl.where(o_c == 2, 2.0**19, 0.0)))[None, :]
    return (nearest(y) - 128 * nearest(y / 128)).to(tl.int8)


@triton.jit
def _products(tile, x, DOT: tl.constexpr):
    """Return tile @ x; on the matrix unit, without loss, if x is given in parts, one per column."""
    return tl.dot(tile, x) if DOT else tl.sum(tile.to(tl.float32) * x[None, :], 1)


@triton.jit
def _of_digits(products):
    """Return the values of int32 products with `_digits`."""
    o_c = tl.arange(0, 16)
    worth = tl.where(o_c == 0, 2.0**-5, tl.where(o_c == 1, 2.0**-12, 2.0**-19))
    return tl.sum(products.to(tl.float32) * worth[None, :], 1)


@triton.jit
def _fetch(p_rows, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Prefetch rows to the L2 cache during another wait."""
    SIZE: tl.constexpr = p_rows.dtype.element_ty.primitive_bitwidth // 8
    o_d = tl.arange(0, BLOCK_D * SIZE // 32) * (32 // SIZE)  # starts of sectors
    inside = inside[:, None] & (o_d < D)[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [(p_rows[:, None] + o_d[None, :]).to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def score_pages(queries, summaries, p_scores, table, i_b, i_h, first_page, stop_page, sizes: tl.constexpr):
    """Store the scores of a list's pages; programs along the grid's second axis share its tiles."""
    D: tl.constexpr = sizes.D
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    p_low, p_high, p_scale, strides, scale_strides = summaries
    first_tile, step = first_page // sizes.TILE + tl.program_id(1), tl.num_programs(1)
    o_d, o_t = tl.arange(0, BLOCK_D), tl.arange(0, sizes.TILE)
    at = i_b.to(tl.int64) * strides.batch + i_h.to(tl.int64) * strides.head
    up, down = _query_bounds(queries, sizes)
    if sizes.FETCH:
        page = first_tile * sizes.TILE + o_t
        known = (page >= first_page) & (page < stop_page)
        physical = physical_pages(table, i_b, page, known, sizes.PAGED)
        first_rows = at + physical.to(tl.int64) * strides.page
        _fetch(p_high + first_rows, physical >= 0, D, BLOCK_D)
        if sizes.MEAN == 0:
            _fetch(p_low + first_rows, physical >= 0, D, BLOCK_D)
    if sizes.MEAN:
        up += down
    unit = 1.0
    if sizes.DOT and sizes.SCALED:
        unit = power_below(tl.max(tl.maximum(tl.abs(up), tl.abs(down)), 0))
        up, down = _digits(up / unit), _digits(down / unit)
    elif sizes.DOT:
        up, down = _thirds(up), _thirds(down)
    p_scale += i_b.to(tl.int64) * scale_strides.batch + i_h.to(tl.int64) * scale_strides.head
    for i_tile in tl.range(first_tile, tl.cdiv(stop_page, sizes.TILE), step, num_stages=sizes.STAGES):
        page = i_tile * sizes.TILE + o_t
        known = (page >= first_page) & (page < stop_page)
        physical = physical_pages(table, i_b, page, known, sizes.PAGED)
        offsets = at + physical.to(tl.int64)[:, None] * strides.page + o_d[None, :]
        inside = (physical >= 0)[:, None] & (o_d < D)[None, :]
        if sizes.SCALED:
            own_scale = tl.load(p_scale + physical.to(tl.int64) * scale_strides.page, mask=physical >= 0, other=0.0)
        score = _products(tl.load(p_high + offsets, mask=inside, other=0), up, sizes.DOT)
        if sizes.MEAN == 0:
            score += _products(tl.load(p_low + offsets, mask=inside, other=0), down, sizes.DOT)
        if sizes.SCALED:
            score = (_of_digits(score) if sizes.DOT else score) * unit * own_scale
        elif sizes.DOT:
            score = tl.sum(score, 1)
        tl.store(p_scores + page, score, mask=known)
