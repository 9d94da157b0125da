# SPDX-License-Identifier: Apache-2.0
"""Host side of the backward over chosen tokens: tiles write rows of dk and dv, and the rows of each key are added.

Rows go through a buffer of at most `WORKSPACE` bytes: a launch takes some tiles of some kv heads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.device import gpu_of, padded, processors
from dynaxx.kernels.runtime.arguments import packed_strides_of, unit_stride
from dynaxx.trained.tokens.kernels.gpu.backward import _token_bwd_kernel, _token_delta_kernel
from dynaxx.trained.tokens.kernels.gpu.config import (
    MAX_BY_PRODUCTS,
    WIDE,
    backward_launch,
    sum_launch,
    wide_launches,
    widths,
)
from dynaxx.trained.tokens.kernels.gpu.entries import KeyPlaces, entries_of_keys
from dynaxx.trained.tokens.kernels.gpu.plan import TokenPlan, shared_arguments, shares_rows
from dynaxx.trained.tokens.kernels.gpu.sums import KEYS_AT_ONCE, _token_sum_kernel, _token_sums_kernel
from dynaxx.trained.tokens.kernels.gpu.wide import _token_dq_kernel, _token_rows_kernel, _token_scores_kernel

WORKSPACE = 4 << 30  # bytes
MAX_ROWS = (1 << 31) // KEYS_AT_ONCE  # of a kv head, so that entries fit int32
PLACE = ("lists", "units", "select_heads", "kv_heads", "slots", "group_size")
TILE = ("D", "GRAIN", "PER_TILE", "PART", "ROWS")
MAX_BOTH = 128  # rows of a tile that a step of the wide backward multiplies at once


class GradientRows(NamedTuple):
    """Rows that tiles add to dk and dv."""

    rows: Tensor  # (kv heads times rows of each, D + E): dk, then dv
    parts: int = 1  # of a tile, which have rows of their own
    by_thread: bool = False  # whether columns are in the order of `hopper/grouped_rows.py`


TileGradients = Callable[..., GradientRows]  # like `narrow_rows`


class Portion(NamedTuple):
    """Some tiles of queries and some kv heads, whose gradients one launch of each kernel computes."""

    q: Tensor
    k: Tensor
    v: Tensor
    dq: Tensor  # (T, Hq, D), of which these tiles and heads are written
    plan: TokenPlan
    heads: range  # kv heads
    tiles: range
    begin: Tensor | None  # int32, rows of a kv head before each tile and unit; None: all take equally many
    arguments: dict[str, Any]  # arguments of all kernels by tile
    latent: bool  # whether v is the first part of k in memory, which is then read once
    joined: bool  # whether dv is added to the first columns of dk

    @property
    def own(self) -> int:
        """Return the units of a kv head."""
        return self.plan.units // self.k.shape[1]

    @property
    def units(self) -> int:
        """Return the units of these heads."""
        return len(self.heads) * self.own

    @property
    def first(self) -> dict[str, int]:
        """Return the first tile and unit, as arguments of kernels."""
        return {"first_tile": self.tiles.start, "first_unit": self.heads.start * self.own}


class WideSteps(NamedTuple):
    """The functions that do the three steps of a wide backward."""

    scores: Callable[..., None]  # `write_scores`
    dq: Callable[..., None]  # `write_dq`
    rows: Callable[..., None]  # `write_rows`


def token_backward(
    do: Tensor,
    dlse: Tensor,
    saved: SavedForward,
    plan: TokenPlan,
    settings: tuple[float, float | None],
    joined: bool,
    steps: WideSteps | TileGradients | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return dq, and dk and dv, or their sum.

    Args:
        do: (T, Hq, E).
        dlse: (Hq, T).
        saved: the forward.
        plan: the selection.
        settings: scale and softcap.
        joined: whether to add dv to the first columns of dk: v is the first part of k, and head_dim above `WIDE`.
        steps: what to use instead of the functions of this module: three steps above `WIDE`, else one function.
    """
    do, q, k, v, out = (unit_stride(x) for x in (do, *saved[:4]))
    if not (q.shape[0] and k.shape[0] and plan.lists.shape[2]):
        return torch.zeros_like(q), [torch.zeros_like(x) for x in ((k,) if joined else (k, v))]
    lse, latent = saved.lse.contiguous(), shares_rows(k, v)
    delta = _delta(do, dlse, out, lse)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    keys, kv_heads = k.shape[:2]
    pieces = _pieces(plan, q, 0 if joined else v.shape[2], k)
    targets = [dk] if joined else [dk, dv]
    sums = targets if len(pieces) == 1 else [torch.empty_like(x, dtype=torch.float32) for x in targets]
    arguments = shared_arguments(q, k, v, plan, *settings)
    arguments |= {"p_do": do, "p_lse": lse, "p_delta": delta, "do_strides": packed_strides_of(do)}
    if isinstance(steps, WideSteps) or (steps is None and max(q.shape[2], v.shape[2]) > WIDE):
        steps = partial(_wide_rows, steps=steps or WideSteps(write_scores, write_dq, write_rows))
    tile_gradients = steps or narrow_rows
    for tiles, heads_at_once in pieces:
        begin, found = _row_begins(plan, tiles, plan.units // kv_heads), None
        for first_head in range(0, kv_heads, heads_at_once):
            heads = range(first_head, min(first_head + heads_at_once, kv_heads))
            found_rows = tile_gradients(Portion(q, k, v, dq, plan, heads, tiles, begin, arguments, latent, joined))
            if found is None or plan.lists.shape[1] > 1:  # otherwise all kv heads share their lists
                group = KEYS_AT_ONCE if _by_products(found_rows) else 1
                found = entries_of_keys(plan, heads, tiles, keys, kv_heads, group, begin)
            _add(sums, found_rows, found, heads, tiles.start > 0)
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


def _pieces(plan: TokenPlan, q: Tensor, columns_v: int, k: Tensor) -> list[tuple[range, int]]:
    """Return tiles, and the number of kv heads, that write their rows in one launch; see `WORKSPACE`."""
    keys, kv_heads = k.shape[:2]
    if plan.rooms is not None:
        own = plan.units // kv_heads
        row = own * (q.shape[2] + columns_v) * q.itemsize
        needed = [row * rows + own * keys * 4 * i for i, rows in enumerate(plan.rooms.before)]
        return _pieces_by_bytes(needed, WORKSPACE, kv_heads, max(1, processors(q.device) // own))
    width = plan.lists.shape[2] * plan.block_size
    own = plan.units // kv_heads
    wide = max(q.shape[2], columns_v) > WIDE
    numbers = own * plan.rows.parts // (_parts_together(plan) if wide else 1) * width * (q.shape[2] + columns_v)
    if wide:
        numbers += 2 * own * plan.rows.parts * width * plan.rows.rows
    fit = WORKSPACE // (numbers * q.itemsize + own * keys * 4)
    fit = max(1, min(fit, MAX_ROWS // (own * plan.rows.parts * width)))
    tiles = len(plan.tiles)
    if fit >= tiles:
        return [(range(tiles), min(kv_heads, fit // tiles))]
    at_once = -(-tiles // -(-tiles // fit))
    return [(range(first, min(first + at_once, tiles)), 1) for first in range(0, tiles, at_once)]


def _pieces_by_bytes(before: list[int], most: int, kv_heads: int, wave: int) -> list[tuple[range, int]]:
    """Return `_pieces` of at most `most` bytes, where tiles take different space: before[i] for all before tile i.

    Late tiles have the longest lists. Pieces are made from the end, of whole waves of programs: multiples of `wave`
    tiles of one kv head.
    """
    pieces: list[tuple[range, int]] = []
    stop = len(before) - 1
    while stop:
        start = min(bisect_left(before, before[stop] - most), stop - 1)
        if start:
            start = stop - max((stop - start) // wave * wave, min(wave, stop - start))
        heads = max(1, min(kv_heads, most // max(1, before[stop] - before[start])))
        pieces.append((range(start, stop), heads))
        stop = start
    return pieces[::-1]


def _row_begins(plan: TokenPlan, tiles: range, own: int) -> Tensor | None:
    """Return the rows before each tile and unit of a kv head, int32; None if all take equally many."""
    if plan.rooms is None:
        return None
    before = plan.rooms.on_device[tiles.start : tiles.stop + 1] - plan.rooms.before[tiles.start]
    if own == 1:
        return before[:-1].int()
    unit = torch.arange(own, device=before.device)
    return (before[:-1, None] * own + before.diff()[:, None] * unit).flatten().int()


def _parts_together(plan: TokenPlan) -> int:
    """Return how many parts of a tile a program of the wide backward multiplies; see `MAX_BOTH`."""
    together = 1
    while plan.rows.parts % (2 * together) == 0 and 2 * together * plan.rows.rows <= MAX_BOTH:
        together *= 2
    return together


def narrow_rows(portion: Portion) -> GradientRows:
    """Write dq of some tiles and kv heads; return their rows."""
    q, k, v, dq, plan, *_ = portion
    parts, gpu = plan.rows.parts, gpu_of(q.device)
    width = plan.lists.shape[2] * plan.block_size
    rows = q.new_empty(portion.units * len(portion.tiles) * parts * width, q.shape[2] + v.shape[2])
    _token_bwd_kernel[(len(portion.tiles), portion.units, parts)](
        q,
        k,
        v,
        p_dq=dq,
        p_rows=rows,
        dq_strides=packed_strides_of(dq),
        **portion.first,
        **portion.arguments,
        **backward_launch(max(q.shape[2], v.shape[2]), q.itemsize, gpu).options(gpu),
    )
    return GradientRows(rows, parts)


def _wide_rows(portion: Portion, steps: WideSteps) -> GradientRows:
    """Do what `narrow_rows` does, in the three steps of `wide.py`."""
    q, _, v, _, plan, *_ = portion
    parts, width = plan.rows.parts, plan.lists.shape[2] * plan.block_size
    together, lists = _parts_together(plan), len(portion.tiles) * portion.units
    weights, ds = (q.new_empty(lists * parts * plan.rows.rows, width) for _ in range(2))
    steps.scores(portion, weights, ds)
    steps.dq(portion, ds, together)
    columns = q.shape[2] + (0 if portion.joined else v.shape[2])
    buffer = q.new_empty(lists * parts // together * width, columns)
    steps.rows(portion, weights, ds, buffer, together)
    return GradientRows(buffer, parts // together)


def write_scores(portion: Portion, weights: Tensor, ds: Tensor) -> None:
    """Write p and ds (tiles * units * parts * rows, entries of a list) of some tiles and kv heads."""
    q, k, v, _, plan, *_ = portion
    gpu = gpu_of(q.device)
    _token_scores_kernel[(len(portion.tiles), portion.units, plan.rows.parts)](
        q,
        k,
        v,
        p_weights=weights,
        p_ds=ds,
        LATENT=portion.latent,
        **portion.first,
        **portion.arguments,
        **wide_launches(q.itemsize, portion.latent, gpu)[0].options(gpu),
    )


def write_dq(portion: Portion, ds: Tensor, together: int) -> None:
    """Write dq of some tiles and kv heads; a program multiplies `together` parts of a tile."""
    q, k, v, dq, plan, *_ = portion
    (d_a, d_b), gpu = widths(q.shape[2]), gpu_of(q.device)
    _token_dq_kernel[(len(portion.tiles), portion.units, 2 * plan.rows.parts // together)](
        k,
        dq,
        ds,
        **{name: portion.arguments[name] for name in ("k_strides", *PLACE, *TILE)},
        **portion.first,
        dq_strides=packed_strides_of(dq),
        D_A=d_a,
        D_B=d_b,
        HALF_A=d_a // 2,
        HALF_B=max(16, d_b // 2),
        BOTH=plan.rows.rows * together,
        HALVES=2,
        **wide_launches(q.itemsize, v.shape[2] < q.shape[2], gpu)[1].options(gpu),
    )


def write_rows(portion: Portion, weights: Tensor, ds: Tensor, buffer: Tensor, together: int) -> None:
    """Write the rows of dk and dv of some tiles and kv heads; `weights` and `ds` come from `write_scores`."""
    q, plan, arguments = portion.q, portion.plan, portion.arguments
    by_key = wide_launches(q.itemsize, portion.joined, gpu_of(q.device))[2]
    chunks = -(-plan.lists.shape[2] * plan.block_size // by_key.block_n)
    _token_rows_kernel[(len(portion.tiles) * chunks, portion.units, plan.rows.parts // together)](
        q,
        arguments["p_do"],
        weights,
        ds,
        buffer,
        **{name: arguments[name] for name in ("q_strides", "do_strides", "E", *PLACE, *TILE)},
        **portion.first,
        chunks=chunks,
        BOTH=plan.rows.rows * together,
        BLOCK_D=16 if q.itemsize == 4 else 64,
        LATENT=portion.joined,
        BLOCK_N=by_key.block_n,
        num_warps=by_key.num_warps,
        num_stages=by_key.prefetch + 1,
    )


def _by_products(found: GradientRows) -> bool:
    """Return whether rows are added by `_token_sums_kernel`."""
    rows = found.rows
    return rows.element_size() == 2 and found.parts == 1 and rows.shape[1] <= MAX_BY_PRODUCTS


def _add(sums: list[Tensor], found_rows: GradientRows, found: KeyPlaces, heads: range, add: bool) -> None:
    """Add the rows of each key, of some kv heads and all parts of a tile, to dk (M, Hk, D) and dv, or to dk alone."""
    rows, parts, by_thread = found_rows
    keys, kv_heads, dim = sums[0].shape
    first, rest = widths(rows.shape[1])
    launch = sum_launch(rows.shape[1], rows.element_size(), parts)
    shared = {
        "keys": keys,
        "kv_heads": kv_heads,
        "first_head": heads.start,
        "choices": found.choices,
        "D": dim,
        "E": rows.shape[1] - dim,
        "W_A": first,
        "W_B": rest,
        "BLOCK_R": launch.block_n,
        "PREFETCH": launch.prefetch,
        "ADD": add,
        "num_warps": launch.num_warps,
    }
    tensors = rows, sums[0], sums[-1], found.entries, found.begin
    if _by_products(found_rows):
        _token_sums_kernel[(-(-keys // KEYS_AT_ONCE), len(heads))](
            *tensors, rows=rows.shape[0] // len(heads), KEYS=KEYS_AT_ONCE, BY_THREAD=by_thread, **shared
        )
    else:
        _token_sum_kernel[(keys, len(heads))](*tensors, slabs=found.slabs, width=found.width, PARTS=parts, **shared)
