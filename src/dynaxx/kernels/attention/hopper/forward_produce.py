# SPDX-License-Identifier: Apache-2.0
"""Producer warp of the Hopper forward: reads the layout, loads q, k and v by TMA, and tells consumers how to mask.

    unit of work -> row's entries -> row numbers, q -> q_full;  per step: mask numbers, k -> k_full, v -> v_full

It runs ahead of the consumers over the rows of its program, so that loads overlap with computation. Consumers do not
read the layout: they receive six numbers per row and, for a masked step, four per block.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dynaxx.kernels.attention.hopper.forward_lazy_softmax import unchecked
from dynaxx.kernels.compat import barrier, tma_load
from dynaxx.kernels.primitives.hopper.parts import read_row, row_or_part, turns_of_program, unit_of_turn
from dynaxx.kernels.primitives.hopper.signals import read_number, send_number

EVERYWHERE = gl.constexpr(1 << 20)  # a band that contains every pair of a block
ROW_FIELDS = gl.constexpr(6)  # numbers per row: index, steps, masked steps, batch entry, first head, slot as a part
FIELDS = gl.constexpr(4)  # numbers per block: first and last distance, number of keys, mask id


class ForwardInputs(NamedTuple):
    """Values that the producer reads, in addition to the layout."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    p_order: Any
    p_lse: Any  # of rows computed once, to find those that lost weights
    p_sums_lse: Any


class ForwardBuffers(NamedTuple):
    """Shared memory between the producer and the consumers, and its barriers."""

    q: Any
    k: Any
    v: Any
    row_numbers: Any
    step_numbers: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class ForwardSizes(NamedTuple):
    """Sizes of a call."""

    seqlen_q: Any
    seqlen_k: Any
    q_heads: Any
    group_size: Any
    together: Any  # units of heads that alternate


@gluon.jit
def _unit_of(i_unit, together, q_blocks, q_heads, HEADS: gl.constexpr):
    """Return first head, batch entry and rank of the row of a unit of work; `together` units of heads alternate."""
    units = q_heads // HEADS
    line = i_unit // (together * q_blocks) * together + i_unit % together
    return line % units * HEADS, line // units, i_unit // together % q_blocks


@gluon.jit
def band_of(layout, mask_id):
    """Return a mask's band, with lo > hi if it has none, and its id, or -1."""
    known = (mask_id >= 0) & (mask_id < layout.num_masks)
    lo = gl.load(layout.tables.p_bands + mask_id * 2, mask=known, other=1)
    hi = gl.load(layout.tables.p_bands + mask_id * 2 + 1, mask=known, other=0)
    lo = gl.where(mask_id == -1, -EVERYWHERE, lo)
    hi = gl.where(mask_id == -1, EVERYWHERE, hi)
    return lo, hi, gl.where(known, mask_id, -1)


@gluon.jit
def _load_step(desc, buffers, full, stage, i_b, i_hk, keys, PARTS: gl.constexpr):
    """Load a step's blocks in PARTS of 64 columns each, as one [STEP, D] tile."""
    BLOCKS: gl.constexpr = len(keys)
    for i_part in gl.static_range(PARTS):
        for u in gl.static_range(BLOCKS):
            at = [i_b, i_hk, keys[u], i_part * desc.block_type.shape[3]]
            buffer = buffers.index((stage * PARTS + i_part) * BLOCKS + u)
            tma_load(desc, at, full.index(stage), buffer)


@gluon.jit
def _lost_rows(p_lse, row, end, CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, step):
    """Return whether rows of a unit of work lost weights: then lse of a row before `end` is NaN."""
    rows = gl.arange(0, 64, gl.BlockedLayout([2], [32], [1], [0]))
    lost = rows * 0
    for u in gl.static_range(CONSUMERS):
        at = row + u * STEP_ROWS + rows
        lse = gl.load(p_lse + u * step + at, mask=at < end, other=0.0)
        lost += (lse != lse).to(gl.int32)
    return gl.max(lost, 0) > 0


@gluon.jit
def produce(
    units, given, buffers, layout, parts, sizes,
    CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr,
    HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Load the units of work of this program, then again those for which a consumer lost a row's weights."""
    all_units, flags, judged = units
    done = 0  # number of steps done
    i_mine = 0
    for i_turn in range(turns_of_program(all_units)):
        done = _feed(
            given, buffers, layout, parts, sizes, unit_of_turn(i_turn), i_mine, done,
            CONSUMERS, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, ORDERED, HAS_PARTS, False,
        )  # fmt: skip
        i_mine += 1
    if unchecked(given.q_desc.dtype):
        mbarrier.wait(judged.index(0), 0)
        all_units = gl.where(read_number(flags, 0) + read_number(flags, CONSUMERS - 1) > 0, all_units, 0)
        for i_turn in range(turns_of_program(all_units)):
            done = _feed(
                given, buffers, layout, parts, sizes, unit_of_turn(i_turn), i_mine, done,
                CONSUMERS, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, ORDERED, HAS_PARTS, True,
            )  # fmt: skip
            i_mine += 1


@gluon.jit
def _feed(
    given, buffers, layout, parts, sizes, i_unit, i_mine, done,
    CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr,
    HAS_PARTS: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """Load unit `i_mine` of this program; return the steps done.

    A row's blocks are processed in steps of STEP keys, which hold several blocks or a piece of one. The order is: empty
    blocks that complete the first step, a last full block that seqlen_k may cut (`tail`), the partial blocks from the
    last one on (under a causal mask, the last one shows something to every query), then the full blocks, which need no
    mask. Parts of long rows come before all rows. With AGAIN, a unit that lost no weights has no blocks.
    """
    HEADS: gl.constexpr = (CONSUMERS - 1) * STEP_HEADS + 1  # heads per program
    BLOCKS: gl.constexpr = (STEP + KV_BLOCK - 1) // KV_BLOCK  # blocks per step
    PIECES: gl.constexpr = (KV_BLOCK + STEP - 1) // STEP  # steps per block
    SLOTS: gl.constexpr = buffers.q.shape[0] // CONSUMERS
    PARTS: gl.constexpr = given.q_desc.block_type.shape[3] // given.k_desc.block_type.shape[3]
    V_PARTS: gl.constexpr = buffers.v.shape[0] // (STAGES * BLOCKS)
    q_blocks = (sizes.seqlen_q + Q_BLOCK - 1) // Q_BLOCK
    part_units = parts.number * parts.batch_copies * parts.head_copies
    i_h, i_b, rank = _unit_of(gl.maximum(i_unit - part_units, 0), sizes.together, q_blocks, sizes.q_heads, HEADS)
    unit = row_or_part(i_unit, i_b, i_h, parts, q_blocks, sizes.q_heads // HEADS, HEADS, HAS_PARTS)
    i_b, i_h, is_part = unit.i_b, unit.i_h, unit.is_part
    i_hk = i_h // sizes.group_size
    i_row, start, count, partial = read_row(
        unit, rank, given.p_order, layout, parts.limit, q_blocks, ORDERED, HAS_PARTS
    )
    if AGAIN:
        lse = given.p_lse + (i_b.to(gl.int64) * sizes.q_heads + i_h) * sizes.seqlen_q
        lost = _lost_rows(lse, i_row * Q_BLOCK, sizes.seqlen_q, CONSUMERS, STEP_ROWS, STEP_HEADS * sizes.seqlen_q)
        if HAS_PARTS:
            part_lse = given.p_sums_lse + gl.where(is_part, i_unit, 0).to(gl.int64) * (CONSUMERS * 64)
            lost = gl.where(is_part, _lost_rows(part_lse, 0, CONSUMERS * 64, CONSUMERS, 64, 0), lost)
            is_part = is_part & lost
        count = gl.where(lost, count, 0)
        partial = gl.where(lost, partial, 0)
        i_row = gl.where(lost, i_row, q_blocks)
    tail = gl.where((count > partial) & (sizes.seqlen_k % KV_BLOCK != 0), 1, 0)
    steps = gl.maximum((count + BLOCKS - 1) // BLOCKS, 1)
    missing = steps * BLOCKS - count
    masked = gl.maximum((missing + tail + partial + BLOCKS - 1) // BLOCKS, 1) * PIECES
    steps *= PIECES
    if AGAIN:
        masked = steps

    slot = i_mine % SLOTS
    mbarrier.wait(buffers.q_empty.index(slot), ((i_mine // SLOTS) & 1) ^ 1)
    for u in gl.static_range(CONSUMERS):
        at = [i_b, i_h + u * STEP_HEADS, i_row * Q_BLOCK + u * STEP_ROWS, 0]
        tma_load(given.q_desc, at, buffers.q_full.index(slot), buffers.q.index(slot * CONSUMERS + u))
    send_number(buffers.row_numbers, slot * ROW_FIELDS, i_row)
    send_number(buffers.row_numbers, slot * ROW_FIELDS + 1, steps)
    send_number(buffers.row_numbers, slot * ROW_FIELDS + 2, masked)
    send_number(buffers.row_numbers, slot * ROW_FIELDS + 3, i_b)
    send_number(buffers.row_numbers, slot * ROW_FIELDS + 4, i_h)
    if HAS_PARTS:
        send_number(buffers.row_numbers, slot * ROW_FIELDS + 5, gl.where(is_part, i_unit, -1))
    barrier()
    mbarrier.expect(buffers.q_full.index(slot), CONSUMERS * given.q_desc.block_type.nbytes)

    for i_step in range(steps):
        first_key = i_step % PIECES * STEP  # offset in the block
        stage = (done + i_step) % STAGES
        free = (((done + i_step) // STAGES) & 1) ^ 1
        keys = ()  # first key of each block; past the end, where TMA returns zeros, for an empty one
        entries = ()
        for u in gl.static_range(BLOCKS):
            position = i_step // PIECES * BLOCKS + u - missing
            place = position - tail
            place = gl.where(place < partial, partial - 1 - place, place)
            entry = gl.where((tail == 1) & (position == 0), start + count - 1, start + place)
            known = (position >= 0) & (entry < layout.capacity)
            block = gl.load(layout.tables.p_indices + entry, mask=known, other=0)
            keys += (gl.where(known, block * KV_BLOCK + first_key, sizes.seqlen_k),)  # type: ignore[assignment]
            entries += (gl.where(known, entry, -1),)  # type: ignore[assignment]
        mbarrier.wait(buffers.k_empty.index(stage), free)
        _load_step(given.k_desc, buffers.k, buffers.k_full, stage, i_b, i_hk, keys, PARTS)
        if i_step < masked:  # while k is loading: barriers accept bytes before they are announced
            masks = ()
            for u in gl.static_range(BLOCKS):
                mask_id = gl.load(layout.tables.p_mask_ids + entries[u], mask=entries[u] >= 0, other=-1)
                masks += (band_of(layout, mask_id),)  # type: ignore[assignment]
            for u in gl.static_range(BLOCKS):
                at_block = (stage * BLOCKS + u) * FIELDS
                send_number(buffers.step_numbers, at_block, masks[u][0] + first_key)
                send_number(buffers.step_numbers, at_block + 1, masks[u][1] + first_key)
                send_number(buffers.step_numbers, at_block + 2, sizes.seqlen_k - keys[u])
                send_number(buffers.step_numbers, at_block + 3, masks[u][2] * PIECES + i_step % PIECES)
            barrier()
        mbarrier.expect(buffers.k_full.index(stage), BLOCKS * PARTS * given.k_desc.block_type.nbytes)
        mbarrier.wait(buffers.v_empty.index(stage), free)
        mbarrier.expect(buffers.v_full.index(stage), BLOCKS * V_PARTS * given.v_desc.block_type.nbytes)
        _load_step(given.v_desc, buffers.v, buffers.v_full, stage, i_b, i_hk, keys, V_PARTS)
    return done + steps
