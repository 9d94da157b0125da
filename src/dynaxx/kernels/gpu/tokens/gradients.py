# SPDX-License-Identifier: Apache-2.0
"""Host side of the backward over chosen tokens: tiles write rows of dk and dv, and the rows of each key are added.

Rows go through a buffer of at most `WORKSPACE` bytes: a launch takes some kv heads, or some tiles of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.gpu.device import padded
from dynaxx.kernels.gpu.runtime.arguments import packed_strides_of
from dynaxx.kernels.gpu.tokens.backward import _token_bwd_kernel, _token_delta_kernel
from dynaxx.kernels.gpu.tokens.config import MOST_BY_PRODUCTS, WIDE, backward_launch, sum_launch, wide_launches, widths
from dynaxx.kernels.gpu.tokens.entries import KeyPlaces, entries_of_keys
from dynaxx.kernels.gpu.tokens.plan import TokenPlan
from dynaxx.kernels.gpu.tokens.sums import KEYS_AT_ONCE, _token_sum_kernel, _token_sums_kernel
from dynaxx.kernels.gpu.tokens.wide import _token_dq_kernel, _token_rows_kernel, _token_scores_kernel

WORKSPACE = 4 << 30  # bytes
PLACE = ("lists", "units", "select_heads", "kv_heads", "slots", "group_size")
TILE = ("D", "GRAIN", "PER_TILE", "PART", "ROWS")
MOST_BOTH = 128  # rows of a tile that a step of the wide backward multiplies at once


TileGradients = Callable[..., tuple[Tensor, int]]  # like `narrow_rows`


class Portion(NamedTuple):
    """Some tiles of queries and some kv heads, whose gradients one launch of each kernel computes."""

    plan: TokenPlan
    heads: range  # kv heads
    tiles: range
    arguments: dict[str, Any]  # arguments of all kernels by tile
    latent: bool  # whether v is the first part of k in memory, which is then read once
    joined: bool  # whether dv is added to the first columns of dk


class WideSteps(NamedTuple):
    """The functions that do the three steps of a wide backward."""

    scores: Callable[..., None]  # `write_scores`
    dq: Callable[..., None]  # `write_dq`
    rows: Callable[..., None]  # `write_rows`


def token_backward(
    do: Tensor,
    dlse: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    plan: TokenPlan,
    shared: dict[str, Any],
    latent: bool,
    joined: bool,
    steps: WideSteps | TileGradients | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return dq, and dk and dv, or their sum.

    Args:
        do: (T, Hq, E).
        dlse: (Hq, T).
        inputs: q, k and v.
        results: out and lse of the forward.
        plan: the selection.
        shared: arguments of all kernels by tile.
        latent: whether v is the first part of k in memory, which is then read once.
        joined: whether to add dv to the first columns of dk; only if `latent`.
        steps: what to use instead of the functions of this module: three steps above `WIDE`, else one function.
    """
    q, k, v = inputs
    delta = _delta(do, dlse, *results)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    tiles, kv_heads = len(plan.tiles), k.shape[1]
    heads_at_once, tiles_at_once = _pieces(plan, q, 0 if joined else v.shape[2], k)
    pieces = -(-tiles // tiles_at_once)
    targets = [dk] if joined else [dk, dv]
    sums = targets if pieces == 1 else [torch.empty_like(x, dtype=torch.float32) for x in targets]
    grads = {"p_do": do, "p_lse": results[1], "p_delta": delta, "do_strides": packed_strides_of(do)}
    if isinstance(steps, WideSteps) or (steps is None and max(q.shape[2], v.shape[2]) > WIDE):
        steps = partial(_wide_rows, steps=steps or WideSteps(write_scores, write_dq, write_rows))
    tile_gradients = steps or narrow_rows
    for first_tile in range(0, tiles, tiles_at_once):
        some, found = range(first_tile, min(first_tile + tiles_at_once, tiles)), None
        for first_head in range(0, kv_heads, heads_at_once):
            heads = range(first_head, min(first_head + heads_at_once, kv_heads))
            portion = Portion(plan, heads, some, shared | grads, latent, joined)
            rows, parts = tile_gradients(inputs, dq, portion)
            if found is None or plan.lists.shape[1] > 1:  # otherwise all kv heads share their lists
                found = entries_of_keys(plan, heads, some, *k.shape[:2])
            _add(sums, rows, found, heads, parts, first_tile > 0)
    return dq, [total.to(k.dtype) for total in sums]


def _delta(do: Tensor, dlse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    delta = torch.empty_like(lse)
    block = padded(do.shape[2])
    rows = max(1, 4096 // block)
    _token_delta_kernel[(-(-do.shape[0] // rows), do.shape[1])](
        do,
        out,
        dlse,
        lse,
        delta,
        queries=do.shape[0],
        do_strides=packed_strides_of(do),
        out_strides=packed_strides_of(out),
        stride_dlse_h=dlse.stride(0),
        stride_dlse_n=dlse.stride(1),
        E=do.shape[2],
        BLOCK_E=block,
        ROWS=rows,
    )
    return delta


def _pieces(plan: TokenPlan, q: Tensor, columns_v: int, k: Tensor) -> tuple[int, int]:
    """Return the number of kv heads and of tiles that write their rows in one launch; see `WORKSPACE`."""
    keys, kv_heads = k.shape[:2]
    width = plan.lists.shape[2] * plan.block_size
    own = plan.units // kv_heads
    wide = max(q.shape[2], columns_v) > WIDE
    numbers = own * plan.rows.parts // (_parts_together(plan) if wide else 1) * width * (q.shape[2] + columns_v)
    if wide:
        numbers += 2 * own * plan.rows.parts * width * plan.rows.rows
    fit = max(1, WORKSPACE // (numbers * q.itemsize + own * keys * 4))
    tiles = len(plan.tiles)
    if fit >= tiles:
        return min(kv_heads, fit // tiles), tiles
    return 1, -(-tiles // -(-tiles // fit))


def _parts_together(plan: TokenPlan) -> int:
    """Return how many parts of a tile a program of the wide backward multiplies; see `MOST_BOTH`."""
    together = 1
    while plan.rows.parts % (2 * together) == 0 and 2 * together * plan.rows.rows <= MOST_BOTH:
        together *= 2
    return together


def narrow_rows(
    inputs: tuple[Tensor, Tensor, Tensor],
    dq: Tensor,
    portion: Portion,
) -> tuple[Tensor, int]:
    """Write dq of some tiles and kv heads; return their rows (dk, then dv) and the parts of a tile."""
    plan, heads, tiles, arguments = portion.plan, portion.heads, portion.tiles, portion.arguments
    q, k, v = inputs
    own, parts = plan.units // k.shape[1], plan.rows.parts
    width = plan.lists.shape[2] * plan.block_size
    rows = q.new_empty(len(heads) * len(tiles) * own * parts * width, q.shape[2] + v.shape[2])
    _token_bwd_kernel[(len(tiles), len(heads) * own, parts)](
        q,
        k,
        v,
        p_dq=dq,
        p_rows=rows,
        first_tile=tiles.start,
        first_unit=heads.start * own,
        dq_strides=packed_strides_of(dq),
        **arguments,
        **backward_launch(max(q.shape[2], v.shape[2]), q.itemsize).options,
    )
    return rows, parts


def write_scores(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: Tensor,
    ds: Tensor,
    portion: Portion,
) -> None:
    """Write p and ds (tiles * units * parts * rows, entries of a list) of some tiles and kv heads."""
    plan, heads, tiles, arguments = portion.plan, portion.heads, portion.tiles, portion.arguments
    q, k, v = inputs
    own = plan.units // k.shape[1]
    _token_scores_kernel[(len(tiles), len(heads) * own, plan.rows.parts)](
        q,
        k,
        v,
        p_weights=weights,
        p_ds=ds,
        LATENT=portion.latent,
        first_tile=tiles.start,
        first_unit=heads.start * own,
        **arguments,
        **wide_launches(q.itemsize, portion.latent)[0].options,
    )


def _wide_rows(
    inputs: tuple[Tensor, Tensor, Tensor],
    dq: Tensor,
    portion: Portion,
    steps: WideSteps,
) -> tuple[Tensor, int]:
    """Do what `narrow_rows` does, in the three steps of `wide.py`."""
    plan, heads, tiles = portion.plan, portion.heads, portion.tiles
    q, k, v = inputs
    own, parts, rows = plan.units // k.shape[1], plan.rows.parts, plan.rows.rows
    width = plan.lists.shape[2] * plan.block_size
    units = len(heads) * own
    together = _parts_together(plan)
    weights, ds = (q.new_empty(len(tiles) * units * parts * rows, width) for _ in range(2))
    steps.scores(inputs, weights, ds, portion)
    steps.dq(inputs, dq, ds, portion, together)
    columns = q.shape[2] + (0 if portion.joined else v.shape[2])
    buffer = q.new_empty(len(tiles) * units * parts // together * width, columns)
    steps.rows(inputs, (weights, ds), buffer, portion, together)
    return buffer, parts // together


def write_dq(
    inputs: tuple[Tensor, Tensor, Tensor],
    dq: Tensor,
    ds: Tensor,
    portion: Portion,
    together: int,
) -> None:
    """Write dq of some tiles and kv heads; a program multiplies `together` parts of a tile."""
    plan, heads, tiles, arguments = portion.plan, portion.heads, portion.tiles, portion.arguments
    q, k, v = inputs
    own = plan.units // k.shape[1]
    d_a, d_b = widths(q.shape[2])
    only = ("k_strides", *PLACE, *TILE)
    _token_dq_kernel[(len(tiles), len(heads) * own, 2 * plan.rows.parts // together)](
        k,
        dq,
        ds,
        **{name: arguments[name] for name in only},
        dq_strides=packed_strides_of(dq),
        D_A=d_a,
        D_B=d_b,
        HALF_A=d_a // 2,
        HALF_B=max(16, d_b // 2),
        BOTH=plan.rows.rows * together,
        HALVES=2,
        first_tile=tiles.start,
        first_unit=heads.start * own,
        **wide_launches(q.itemsize, v.shape[2] < q.shape[2])[1].options,
    )


def write_rows(
    inputs: tuple[Tensor, Tensor, Tensor],
    scores: tuple[Tensor, Tensor],
    buffer: Tensor,
    portion: Portion,
    together: int,
) -> None:
    """Write the rows of dk and dv of some tiles and kv heads; `scores` are p and ds."""
    plan, heads, tiles, arguments = portion.plan, portion.heads, portion.tiles, portion.arguments
    q, k, _ = inputs
    own = plan.units // k.shape[1]
    by_key = wide_launches(q.itemsize, portion.joined)[2]
    chunks = -(-plan.lists.shape[2] * plan.block_size // by_key.block_n)
    only = ("q_strides", "do_strides", "E", *PLACE, *TILE)
    _token_rows_kernel[(len(tiles) * chunks, len(heads) * own, plan.rows.parts // together)](
        q,
        arguments["p_do"],
        *scores,
        buffer,
        **{name: arguments[name] for name in only},
        chunks=chunks,
        BOTH=plan.rows.rows * together,
        BLOCK_D=16 if q.itemsize == 4 else 64,
        LATENT=portion.joined,
        first_tile=tiles.start,
        first_unit=heads.start * own,
        BLOCK_N=by_key.block_n,
        num_warps=by_key.num_warps,
        num_stages=by_key.prefetch + 1,
    )


def _add(sums: list[Tensor], rows: Tensor, found: KeyPlaces, heads: range, parts: int, add: bool) -> None:
    """Add the rows of each key, of some kv heads and all parts of a tile, to dk (M, Hk, D) and dv, or to dk alone."""
    keys, kv_heads, dim = sums[0].shape
    first, rest = widths(rows.shape[1])
    launch = sum_launch(rows.shape[1], rows.element_size(), parts)
    by_products = rows.element_size() == 2 and parts == 1 and rows.shape[1] <= MOST_BY_PRODUCTS
    kernel = _token_sums_kernel if by_products else _token_sum_kernel
    kernel[(-(-keys // KEYS_AT_ONCE) if by_products else keys, len(heads))](
        rows,
        sums[0],
        sums[-1],
        found.entries,
        found.begin,
        keys=keys,
        kv_heads=kv_heads,
        first_head=heads.start,
        slabs=found.slabs,
        width=found.width,
        choices=found.choices,
        D=dim,
        E=rows.shape[1] - dim,
        W_A=first,
        W_B=rest,
        PARTS=parts,
        BLOCK_R=launch.block_n,
        PREFETCH=launch.prefetch,
        ADD=add,
        num_warps=launch.num_warps,
    )
