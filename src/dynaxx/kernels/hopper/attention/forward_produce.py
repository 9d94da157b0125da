# SPDX-License-Identifier: Apache-2.0
"""Producer warp of the Hopper forward: reads the layout, loads q, k and v by TMA, and tells consumers how to mask.

    unit of work -> row's entries -> row numbers, q -> q_full;  per step: mask numbers, k -> k_full, v -> v_full

It runs ahead of the consumers over the rows of its program, so that loads overlap with computation. Consumers do not
read the layout: they receive six numbers per row and, for a masked step, four per block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from dynaxx.kernels.hopper.attention.forward_lazy_softmax import unchecked
from dynaxx.kernels.hopper.primitives.parts import row_part
from dynaxx.kernels.hopper.primitives.signals import look, put

EVERYWHERE = gl.constexpr(1 << 20)  # a band that contains every pair of a block
ROW_FIELDS = gl.constexpr(6)  # numbers per row: index, steps, masked steps, batch entry, first head, slot as a part
FIELDS = gl.constexpr(4)  # numbers per block: first and last distance, number of keys, code


@gluon.jit
def _unit_of(i_unit, together, q_blocks, q_heads, HEADS: gl.constexpr):
    """Return first head, batch entry and rank of the row of a unit of work; `together` units of heads alternate."""
    units = q_heads // HEADS
    line = i_unit // (together * q_blocks) * together + i_unit % together
    return line % units * HEADS, line // units, i_unit // together % q_blocks


@gluon.jit
def band_of(p_bands, num_masks, code):
    """Return a mask's band, with lo > hi if it has none, and its code, or -1."""
    known = (code >= 0) & (code < num_masks)
    lo = gl.load(p_bands + code * 2, mask=known, other=1)
    hi = gl.load(p_bands + code * 2 + 1, mask=known, other=0)
    lo = gl.where(code == -1, -EVERYWHERE, lo)
    hi = gl.where(code == -1, EVERYWHERE, hi)
    return lo, hi, gl.where(known, code, -1)


@gluon.jit
def _load_step(desc, buffers, full, stage, i_b, i_hk, keys, PARTS: gl.constexpr):
    """Load a step's blocks in PARTS of 64 columns each, as one [STEP, D] tile."""
    BLOCKS: gl.constexpr = len(keys)
    for i_part in gl.static_range(PARTS):
        for u in gl.static_range(BLOCKS):
            at = [i_b, i_hk, keys[u], i_part * desc.block_type.shape[3]]
            buffer = buffers.index((stage * PARTS + i_part) * BLOCKS + u)
            tma.async_copy_global_to_shared(desc, at, full.index(stage), buffer)


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
    units, blocks, CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr,
    HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Load the units of work of this program, then again those for which a consumer lost a row's weights."""
    all_units, flags, judged = units
    done = 0  # number of steps done
    i_mine = 0
    for i_unit in range(gl.program_id(0), all_units, gl.num_programs(0)):
        done = _feed(
            blocks, i_unit, i_mine, done,
            CONSUMERS, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, ORDERED, HAS_PARTS, False,
        )  # fmt: skip
        i_mine += 1
    if unchecked(blocks[0].dtype):
        mbarrier.wait(judged.index(0), 0)
        all_units = gl.where(look(flags, 0) + look(flags, CONSUMERS - 1) > 0, all_units, 0)
        for i_unit in range(gl.program_id(0), all_units, gl.num_programs(0)):
            done = _feed(
                blocks, i_unit, i_mine, done,
                CONSUMERS, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, ORDERED, HAS_PARTS, True,
            )  # fmt: skip
            i_mine += 1


@gluon.jit
def _feed(
    blocks, i_unit, i_mine, done, CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr,
    HAS_PARTS: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """Load unit `i_mine` of this program; return the steps done.

    A row's blocks are processed in steps of STEP keys, which hold several blocks or a piece of one. The order is: empty
    blocks that complete the first step, a last full block that seqlen_k may cut (`tail`), the partial blocks from the
    last one on (under a causal mask, the last one shows something to every query), then the full blocks, which need no
    mask. Parts of long rows come before all rows. A row that is split into parts is a unit without blocks, past the end
    of the queries, where nothing is stored. With AGAIN, so are the units that lost no weights.
    """
    (
        q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers, row_numbers, step_numbers,
        q_full, q_empty, k_full, k_empty, v_full, v_empty, p_order, p_indptr, p_num_partial, p_indices,
        p_codes, p_bands, capacity, num_masks, layout_stride_b, layout_stride_h,
        p_parts, num_parts, limit, batch_copies, head_copies,
        seqlen_q, seqlen_k, q_heads, group_size, together, p_lse, p_sums_lse,
    ) = blocks  # fmt: skip
    HEADS: gl.constexpr = (CONSUMERS - 1) * STEP_HEADS + 1  # heads per program
    BLOCKS: gl.constexpr = (STEP + KV_BLOCK - 1) // KV_BLOCK  # blocks per step
    PIECES: gl.constexpr = (KV_BLOCK + STEP - 1) // STEP  # steps per block
    SLOTS: gl.constexpr = q_buffers.shape[0] // CONSUMERS
    PARTS: gl.constexpr = q_desc.block_type.shape[3] // k_desc.block_type.shape[3]
    V_PARTS: gl.constexpr = v_buffers.shape[0] // (STAGES * BLOCKS)
    q_blocks = (seqlen_q + Q_BLOCK - 1) // Q_BLOCK
    part_units = num_parts * batch_copies * head_copies
    i_h, i_b, rank = _unit_of(gl.maximum(i_unit - part_units, 0), together, q_blocks, q_heads, HEADS)
    if HAS_PARTS:
        is_part, part_b, part_unit, part_row, first, last = row_part(
            i_unit, p_parts, num_parts, batch_copies, head_copies, q_blocks, q_heads // HEADS
        )
        i_h = gl.where(is_part, part_unit * HEADS, i_h)
        i_b = gl.where(is_part, part_b, i_b)
    i_hk = i_h // group_size
    lead = (i_b * layout_stride_b + i_h * layout_stride_h).to(gl.int64)
    i_row = q_blocks - 1 - rank  # longest rows first, under a causal mask
    if ORDERED:
        i_row = gl.load(p_order + lead * q_blocks + rank)
        i_row = gl.minimum(gl.maximum(i_row, 0), q_blocks - 1)
    if HAS_PARTS:
        i_row = gl.where(is_part, part_row, i_row)
    p_row = p_indptr + lead * (q_blocks + 1) + i_row
    start = gl.minimum(gl.maximum(gl.load(p_row), 0), capacity)
    count = gl.minimum(gl.maximum(gl.load(p_row + 1), start), capacity) - start
    partial = gl.minimum(gl.maximum(gl.load(p_num_partial + lead * q_blocks + i_row), 0), count)
    if HAS_PARTS:
        split = (count > limit) & (i_unit >= part_units)
        first = gl.where(is_part, gl.minimum(first, count), 0)
        last = gl.where(is_part, gl.minimum(last, count), gl.where(split, 0, count))
        start += first
        count = last - first
        partial = gl.minimum(gl.maximum(partial - first, 0), count)
        i_row = gl.where(split, q_blocks, i_row)
    if AGAIN:
        lse = p_lse + (i_b.to(gl.int64) * q_heads + i_h) * seqlen_q
        lost = _lost_rows(lse, i_row * Q_BLOCK, seqlen_q, CONSUMERS, STEP_ROWS, STEP_HEADS * seqlen_q)
        if HAS_PARTS:
            part_lse = p_sums_lse + gl.where(is_part, i_unit, 0).to(gl.int64) * (CONSUMERS * 64)
            lost = gl.where(is_part, _lost_rows(part_lse, 0, CONSUMERS * 64, CONSUMERS, 64, 0), lost)
            is_part = is_part & lost
        count = gl.where(lost, count, 0)
        partial = gl.where(lost, partial, 0)
        i_row = gl.where(lost, i_row, q_blocks)
    tail = gl.where((count > partial) & (seqlen_k % KV_BLOCK != 0), 1, 0)
    steps = gl.maximum((count + BLOCKS - 1) // BLOCKS, 1)
    missing = steps * BLOCKS - count
    masked = gl.maximum((missing + tail + partial + BLOCKS - 1) // BLOCKS, 1) * PIECES
    steps *= PIECES
    if AGAIN:
        masked = steps

    slot = i_mine % SLOTS
    mbarrier.wait(q_empty.index(slot), ((i_mine // SLOTS) & 1) ^ 1)
    for u in gl.static_range(CONSUMERS):
        at = [i_b, i_h + u * STEP_HEADS, i_row * Q_BLOCK + u * STEP_ROWS, 0]
        tma.async_copy_global_to_shared(q_desc, at, q_full.index(slot), q_buffers.index(slot * CONSUMERS + u))
    put(row_numbers, slot * ROW_FIELDS, i_row)
    put(row_numbers, slot * ROW_FIELDS + 1, steps)
    put(row_numbers, slot * ROW_FIELDS + 2, masked)
    put(row_numbers, slot * ROW_FIELDS + 3, i_b)
    put(row_numbers, slot * ROW_FIELDS + 4, i_h)
    if HAS_PARTS:
        put(row_numbers, slot * ROW_FIELDS + 5, gl.where(is_part, i_unit, -1))
    gl.thread_barrier()
    mbarrier.expect(q_full.index(slot), CONSUMERS * q_desc.block_type.nbytes)

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
            known = (position >= 0) & (entry < capacity)
            block = gl.load(p_indices + entry, mask=known, other=0)
            keys += (gl.where(known, block * KV_BLOCK + first_key, seqlen_k),)  # type: ignore[assignment]
            entries += (gl.where(known, entry, -1),)  # type: ignore[assignment]
        mbarrier.wait(k_empty.index(stage), free)
        _load_step(k_desc, k_buffers, k_full, stage, i_b, i_hk, keys, PARTS)
        if i_step < masked:  # while k is loading: barriers accept bytes before they are announced
            masks = ()
            for u in gl.static_range(BLOCKS):
                code = gl.load(p_codes + entries[u], mask=entries[u] >= 0, other=-1)
                masks += (band_of(p_bands, num_masks, code),)  # type: ignore[assignment]
            for u in gl.static_range(BLOCKS):
                at_block = (stage * BLOCKS + u) * FIELDS
                put(step_numbers, at_block, masks[u][0] + first_key)
                put(step_numbers, at_block + 1, masks[u][1] + first_key)
                put(step_numbers, at_block + 2, seqlen_k - keys[u])
                put(step_numbers, at_block + 3, masks[u][2] * PIECES + i_step % PIECES)
            gl.thread_barrier()
        mbarrier.expect(k_full.index(stage), BLOCKS * PARTS * k_desc.block_type.nbytes)
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), BLOCKS * V_PARTS * v_desc.block_type.nbytes)
        _load_step(v_desc, v_buffers, v_full, stage, i_b, i_hk, keys, V_PARTS)
    return done + steps
