# SPDX-License-Identifier: Apache-2.0
"""Producer warp of the Hopper backward over kv blocks: reads the layout and loads k and v, then tiles of q and do.

    layout (transposed) -> per entry: wait empty[stage] -> lse, delta, mask numbers, q, do by TMA -> full[stage]

Each tile of 64 queries comes with its lse and delta and, if it is masked, with its band or its mask id.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dynaxx.kernels.attention.hopper.backward_columns import read_column
from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.attention.hopper.forward_produce import band_of
from dynaxx.kernels.compat import barrier, tma_load
from dynaxx.kernels.primitives.hopper.signals import NUMBERS, barriers, send_number

RING = gl.constexpr(8)  # tiles whose numbers are stored: those in flight, and the previous one
FIELDS = gl.constexpr(4)  # numbers per tile: its index in the group, first and last distance and id of its mask
NOWHERE = gl.constexpr(1 << 22)  # a tile past the end of all sums, which TMA ignores; a negative one would be invalid


class Fed(NamedTuple):
    """The shared memory that the producer fills, and its barriers."""

    q: Any
    do: Any
    k: Any
    v: Any
    kv_full: Any
    full: Any  # by stage: q, do, numbers and stats are there
    empty: Any  # by stage: all consumers have read them
    numbers: Any
    stats: Any  # lse and delta


class ProducerArguments(NamedTuple):
    """Values that the producer reads, in addition to the layout, and buffers that it fills."""

    q_desc: Any
    do_desc: Any
    k_desc: Any
    v_desc: Any
    fed: Any  # `Fed`
    p_lse: Any  # of the first q head
    p_delta: Any


@gluon.jit
def fed_by(q_desc, do_desc, k_desc, v_desc, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate what `produce` fills; KEYS is the number of buffers of ROWS keys."""
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[3]
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], do_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [KEYS, 1, 1, ROWS, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [KEYS, 1, 1, ROWS, D], v_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], NUMBERS)
    stats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], NUMBERS)
    kv_full = barriers(1, 1)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, CONSUMERS)
    return Fed(q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, numbers, stats)


@gluon.jit
def produce(
    given, layout, column, q_blocks, first_key,
    CONSUMERS: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    HAS_PARTS: gl.constexpr, ENDING: gl.constexpr = False, cut=False, last_first=False,
):  # fmt: skip
    """Load the keys of one kv head, starting at `first_key` of a block, then the tiles of all its q heads.

    Partial blocks come first for each head. If `cut` is set, full blocks are treated as partial. If `last_first` is
    set, full blocks come in reverse order.
    """
    fed = given.fed
    full, empty, numbers = fed.full, fed.empty, fed.numbers
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    BUFFERS: gl.constexpr = fed.k.shape[0]
    mbarrier.expect(fed.kv_full.index(0), 2 * BUFFERS * given.k_desc.block_type.nbytes)
    for u in gl.static_range(BUFFERS):
        at = [column.i_b, column.i_hk, column.i_col * KV_BLOCK + first_key + u * ROWS, 0]
        tma_load(given.k_desc, at, fed.kv_full.index(0), fed.k.index(u))
        tma_load(given.v_desc, at, fed.kv_full.index(0), fed.v.index(u))
    done = 0
    before = 0
    for i_group in range(column.heads):
        i_h = column.i_h + i_group
        start, count, partial, before = read_column(layout, column, i_h, before, HAS_PARTS)
        if cut:
            partial = count
        for i_tile in range(count * SPLIT):
            entry = start + i_tile // SPLIT
            if last_first:
                entry = gl.where(i_tile < partial * SPLIT, entry, 2 * start + partial + count - 1 - entry)
            part = i_tile % SPLIT
            block = gl.load(layout.tables.p_indices + entry)
            known = gl.minimum(gl.maximum(block, 0), q_blocks - 1)
            tile = (i_group * q_blocks + known) * SPLIT + part
            o_row = tile * ROWS + gl.arange(0, ROWS, gl.BlockedLayout([2], [32], [1], [0]))
            lse, delta = gl.load(given.p_lse + o_row), gl.load(given.p_delta + o_row)
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            fed.stats.index(stage * 2).store(lse)
            fed.stats.index(stage * 2 + 1).store(delta)
            at_tile = done % RING * FIELDS
            send_number(numbers, at_tile, gl.where(block == known, tile, NOWHERE))
            if i_tile < partial * SPLIT:
                lo, hi, mask_id = band_of(layout, gl.load(layout.tables.p_mask_ids + entry))
                send_number(numbers, at_tile + 1, lo - part * ROWS)
                send_number(numbers, at_tile + 2, hi - part * ROWS)
                send_number(numbers, at_tile + 3, mask_id)
            barrier()
            mbarrier.expect(full.index(stage), 2 * given.q_desc.block_type.nbytes)
            at = [column.i_b, i_h, block * Q_BLOCK + part * ROWS, 0]
            tma_load(given.q_desc, at, full.index(stage), fed.q.index(stage))
            tma_load(given.do_desc, at, full.index(stage), fed.do.index(stage))
            done += 1
    if ENDING:  # consumers wait for the tile after the last one, but do not use it
        mbarrier.wait(empty.index(done % STAGES), ((done // STAGES) & 1) ^ 1)
        mbarrier.arrive(full.index(done % STAGES), count=1)
