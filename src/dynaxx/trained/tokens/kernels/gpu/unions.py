# SPDX-License-Identifier: Apache-2.0
"""Lists of the blocks that neighbouring queries chose: each block once, with a bit per query.

    choices of a tile's queries -> marks in a table of all blocks -> blocks with any mark, in ascending order

A program goes through tiles with one table of its own, so memory is linear in the number of keys. One query at a time
adds its bit to marks. Its blocks differ, so this takes no atomics.
"""

import triton
import triton.language as tl

from dynaxx.kernels.runtime.launcher import kernel_launcher


@kernel_launcher
@triton.jit(do_not_specialize=["lists", "heads", "slots", "blocks", "capacity"])
def _token_union_kernel(
    p_chosen,  # (T, Hs, n) int32 contiguous
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32
    p_table,  # (programs, blocks), zeros: marks
    p_lists,  # (tiles, Hs, capacity) int32: blocks in ascending order
    p_marks,  # (tiles, Hs, capacity): a bit per query
    p_counts,  # (tiles, Hs) int32
    lists,  # tiles * Hs
    heads,
    slots,
    blocks,  # of the longest sequence
    capacity,
    GRAIN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    o_s, o_w = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_W)
    i_program = tl.program_id(0).to(tl.int64)
    p_table += i_program * blocks
    for i_list in range(i_program, lists, tl.num_programs(0)):
        i_tile, i_head = i_list // heads, i_list % heads
        first, count = tl.load(p_tiles + 2 * i_tile), tl.load(p_tiles + 2 * i_tile + 1)
        last = tl.load(p_position + first + count - 1)  # that of the tile's last query is the largest
        for place in range(count):
            position = tl.load(p_position + first + place)
            p_row = p_chosen + ((first + place) * heads + i_head) * slots
            for start in range(0, slots, BLOCK_S):
                block = tl.load(p_row + start + o_s, mask=start + o_s < slots, other=-1)
                seen = (block >= 0) & (block <= position) & (block * GRAIN <= position)
                p_mark = p_table + tl.where(seen, block, 0)
                # Past the first cache, which is too small for the table.
                marks = tl.load(p_mark, mask=seen, other=0, cache_modifier=".cg")
                bit = tl.full([BLOCK_S], 1, tl.int32) << place
                tl.store(p_mark, (marks.to(tl.int32) | bit).to(p_table.dtype.element_ty), mask=seen)
            tl.debug_barrier()  # the next query may have the same blocks
        total = 0
        p_own, p_own_marks = p_lists + i_list * capacity, p_marks + i_list * capacity
        used = tl.where(last < 0, 0, last // GRAIN + 1)
        for start in range(0, used, BLOCK_W):
            block = start + o_w
            marks = tl.load(p_table + block, mask=block < used, other=0, cache_modifier=".cg")
            tl.store(p_table + block, marks * 0, mask=block < used)
            found = (marks != 0).to(tl.int32)
            at = total + tl.cumsum(found, 0) - 1
            tl.store(p_own + at, block, mask=found != 0)
            tl.store(p_own_marks + at, marks, mask=found != 0)
            total += tl.sum(found, 0)
        tl.store(p_counts + i_list, total)
        tl.debug_barrier()
