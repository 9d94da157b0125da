# SPDX-License-Identifier: Apache-2.0
"""Find each key in the lists of tiles: the lists are turned around, without a sort.

    lists -> table of slabs x keys: place in the list, -1 for none -> entries of each key in the order of slabs

A slab is the list of one tile and one unit of a kv head. Nothing depends on the order in which programs run.

Entries of neighbouring keys may also follow each other slab by slab, as their rows do in memory. An entry then says
which of the keys it belongs to.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.gpu.plan import TokenPlan
from dynaxx.trained.tokens.kernels.gpu.primitives import listed_keys

PLACES = 1024  # list places that a program writes
KEYS, SLABS = 128, 16  # part of the table that a program reads at once
GROUP_PLACES = 2048  # the same, where keys share their entries


class KeyPlaces(NamedTuple):
    """The places of each key."""

    entries: Tensor  # int32: slab * width + place, by (choice, key); with groups, row * their size + key in group
    begin: Tensor  # (choices * groups + 1,) int32, where the entries of each (choice, group) begin; M groups of 1 key
    choices: int  # kv heads that choose apart; 1: all share a choice
    slabs: int
    width: int  # places of a list: slots times tokens per block


@kernel_launcher
@triton.jit(do_not_specialize=["first_tile", "first_unit", "own", "units", "select_heads", "slots", "keys", "slabs"])
def _token_places_kernel(
    p_lists,  # (tiles, Hs, slots) int32
    p_counts,  # (tiles, Hs) int32
    p_tiles,  # (tiles, 2) int32
    p_position,
    p_first_key,
    p_table,  # (choices, slabs, M) int16 or int32, -1
    first_tile,
    first_unit,
    own,  # units of a kv head
    units,
    select_heads,
    slots,
    keys,
    slabs,
    GRAIN: tl.constexpr,
    PER_TILE: tl.constexpr,
    PLACES: tl.constexpr,
):
    i_slab, i_choice = tl.program_id(0), tl.program_id(1)
    i_tile = first_tile + i_slab // own
    i_unit = first_unit + i_choice * own + i_slab % own
    i_list = i_tile.to(tl.int64) * select_heads + i_unit * select_heads // units
    first, number = tl.load(p_tiles + 2 * i_tile), tl.load(p_tiles + 2 * i_tile + 1)
    last, first_key = tl.load(p_position + first + number - 1), tl.load(p_first_key + first)
    count = slots
    if PER_TILE > 1:
        count = tl.load(p_counts + i_list)
    start = tl.program_id(2) * PLACES
    key, there = listed_keys(p_lists + i_list * slots, start, count, last, GRAIN, PLACES)
    at = (i_choice * slabs + i_slab).to(tl.int64) * keys + first_key + key
    tl.store(p_table + at, start + tl.arange(0, PLACES), mask=there)


@kernel_launcher
@triton.jit(do_not_specialize=["keys", "slabs", "width"])
def _token_entries_kernel(
    p_table,
    p_begin,  # (choices * M + 1,) int32: receives counts behind a zero, or holds where entries begin
    p_entries,
    keys,
    slabs,
    width,
    KEYS: tl.constexpr,
    SLABS: tl.constexpr,
    WRITE: tl.constexpr,  # write entries; otherwise count them
):
    i_choice = tl.program_id(1)
    key, o_s = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, SLABS)
    at = i_choice * keys + key
    done = tl.zeros([KEYS], tl.int32)
    if WRITE:
        done = tl.load(p_begin + at, mask=key < keys, other=0)
    p_table += i_choice.to(tl.int64) * slabs * keys
    for first in range(0, slabs, SLABS):
        slab = first + o_s
        known = (slab < slabs)[:, None] & (key < keys)[None, :]
        place = tl.load(p_table + slab.to(tl.int64)[:, None] * keys + key[None, :], mask=known, other=-1).to(tl.int32)
        there = (place >= 0).to(tl.int32)
        if WRITE:
            to = done[None, :] + tl.cumsum(there, 0) - 1
            tl.store(p_entries + to, slab[:, None] * width + place, mask=there != 0)
        done += tl.sum(there, 0)
    if not WRITE:
        tl.store(p_begin + 1 + at, done, mask=key < keys)


@kernel_launcher
@triton.jit(do_not_specialize=["keys", "slabs"])
def _token_group_entries_kernel(
    p_table,
    p_begin,  # (choices * groups + 1,) int32, as in `_token_entries_kernel`
    p_entries,
    p_first,  # (slabs,) int32: row of the first entry of each slab
    keys,
    slabs,
    KEYS: tl.constexpr,  # keys per group
    PLACES: tl.constexpr,  # places of the table that a program reads at once
    WRITE: tl.constexpr,
):
    """Count or write the entries of a group of keys, slab by slab."""
    i_group, i_choice = tl.program_id(0), tl.program_id(1)
    at = i_choice * tl.num_programs(0) + i_group
    done = 0
    if WRITE:
        done = tl.load(p_begin + at)
    p_table += i_choice.to(tl.int64) * slabs * keys
    own = tl.arange(0, PLACES) % KEYS
    key = i_group * KEYS + own
    for start in range(0, slabs * KEYS, PLACES):
        slab = (start + tl.arange(0, PLACES)) // KEYS
        known = (slab < slabs) & (key < keys)
        place = tl.load(p_table + slab.to(tl.int64) * keys + key, mask=known, other=-1).to(tl.int32)
        there = (place >= 0).to(tl.int32)
        if WRITE:
            to = done + tl.cumsum(there, 0) - 1
            row = tl.load(p_first + slab, mask=slab < slabs, other=0) + place
            tl.store(p_entries + to, row * KEYS + own, mask=there != 0)
        done += tl.sum(there, 0)
    if not WRITE:
        tl.store(p_begin + 1 + at, done)


def entries_of_keys(
    plan: TokenPlan, heads: range, tiles: range, keys: int, kv_heads: int, group: int = 1, begin: Tensor | None = None
) -> KeyPlaces:
    """Return the places of each key in the lists of some tiles, for each of some kv heads or for all of them.

    Nothing is read back from the device. `group` keys share their entries. `begin` has the rows before each slab.
    """
    own, select_heads, slots = plan.units // kv_heads, *plan.lists.shape[1:]
    choices, slabs, width = 1 if select_heads == 1 else len(heads), len(tiles) * own, slots * plan.block_size
    table = plan.lists.new_full((choices, slabs, keys), -1, dtype=torch.int16 if width <= 1 << 15 else torch.int32)
    _token_places_kernel[(slabs, choices, -(-width // PLACES))](
        plan.lists,
        plan.lists if plan.counts is None else plan.counts,
        plan.tiles,
        plan.position,
        plan.first_key,
        table,
        first_tile=tiles.start,
        first_unit=0 if select_heads == 1 else heads.start * own,
        own=own,
        units=plan.units,
        select_heads=select_heads,
        slots=slots,
        keys=keys,
        slabs=slabs,
        GRAIN=plan.block_size,
        PER_TILE=plan.rows.per_tile,
        PLACES=PLACES,
    )
    groups = -(-keys // group)
    if begin is None and group > 1:
        begin = torch.arange(slabs, dtype=torch.int32, device=table.device) * width
    starts = plan.lists.new_zeros(choices * groups + 1)
    entries = plan.lists.new_empty(choices * slabs * width)
    for write in (False, True):
        if group > 1:
            _token_group_entries_kernel[(groups, choices)](
                table,
                starts,
                entries,
                begin,
                keys=keys,
                slabs=slabs,
                KEYS=group,
                PLACES=GROUP_PLACES,
                WRITE=write,
            )
        else:
            _token_entries_kernel[(-(-keys // KEYS), choices)](
                table,
                starts,
                entries,
                keys=keys,
                slabs=slabs,
                width=width,
                KEYS=KEYS,
                SLABS=SLABS,
                WRITE=write,
            )
        if not write:
            starts = starts.cumsum(0, dtype=torch.int32)
    return KeyPlaces(entries, starts, choices, slabs, width)
