# SPDX-License-Identifier: Apache-2.0
"""Producer warp of selected attention by query; it takes tiles of queries from a counter.

    next tile -> q -> window: k, v -> union: k, v -> results of the other branches

It loads by TMA a tile's queries, the keys and values of its window and its union, and the other branches' results.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dynaxx.kernels.compat import tma_load
from dynaxx.kernels.primitives.hopper.signals import send_number
from dynaxx.trained.nsa.kernels.hopper.selected_tiles import LOST, TURN, feed_block, feed_blocks, row_tile, window_of


@gluon.jit
def produce(
    blocks, CONSUMERS: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, MIXED: gl.constexpr, WINDOWED: gl.constexpr, SWEEP: gl.constexpr,
):  # fmt: skip
    """Load tiles until all are taken, then signal the end."""
    (
        q_desc, k_desc, v_desc, cmp_desc, swa_desc, q_buffers, k_buffers, v_buffers, numbers, q_full, q_empty, full,
        empty, p_last_key, p_first_block, p_block_start, p_starts, p_counts, p_state, tiles, window, queries, heads,
        heads_per_kv,
    ) = blocks  # fmt: skip
    turn, done = 0, 0
    i_turn = gl.program_id(0)
    while i_turn < tiles:
        i_tile = tiles - 1 - i_turn  # the first queries, which see the least, come last
        i_head, first_t = i_tile % heads, i_tile // heads * (CONSUMERS * POSITIONS)
        wanted = True
        if SWEEP == 1:
            wanted = gl.load(p_state + LOST + i_tile) != 0
        if wanted:
            i_hk = i_head // heads_per_kv
            count = gl.load(p_counts + i_tile)
            mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
            send_number(numbers, 0, i_tile)
            mbarrier.expect(q_full.index(0), CONSUMERS * q_desc.block_type.nbytes)
            for u in gl.static_range(CONSUMERS):
                at = [first_t + u * POSITIONS, i_head * GROUP, 0]
                tma_load(q_desc, at, q_full.index(0), q_buffers.index(u))
            if WINDOWED:
                begin, window_count = window_of(
                    p_last_key, p_first_block, p_block_start, first_t, CONSUMERS * POSITIONS, queries, window, KV_BLOCK
                )
                for i_block in range(window_count):
                    at = [i_hk, begin + i_block * KV_BLOCK, 0]
                    feed_block(k_desc, v_desc, k_buffers, v_buffers, full, empty, done + i_block, at, STAGES)
                done += window_count
            p_own = p_starts + i_tile.to(gl.int64) * SLOTS
            feed_blocks(k_desc, v_desc, k_buffers, v_buffers, full, empty, p_own, count, done, i_hk, STAGES)
            done += count
            turn += 1
        i_turn = gl.num_programs(0) + gl.atomic_add(p_state + (TURN + SWEEP), 1)
        if MIXED:  # noqa: SIM102
            if wanted:
                BRANCHES: gl.constexpr = 1 if WINDOWED else 2
                for u in gl.static_range(CONSUMERS):
                    stage = done % STAGES
                    mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(stage), BRANCHES * q_desc.block_type.nbytes)
                    at = [first_t + u * POSITIONS, i_head * GROUP, 0]
                    tma_load(cmp_desc, at, full.index(stage), row_tile(k_buffers, q_desc, stage))
                    if not WINDOWED:
                        swa = row_tile(v_buffers, q_desc, stage)
                        tma_load(swa_desc, at, full.index(stage), swa)
                    done += 1
    mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
    send_number(numbers, 0, -1)
    mbarrier.arrive(q_full.index(0), count=1)
