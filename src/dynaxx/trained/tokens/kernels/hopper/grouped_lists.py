# SPDX-License-Identifier: Apache-2.0
"""Lists of the tokens that neighbouring queries chose, as `gpu/unions.py` makes them, by marks in shared memory.

    choices of a tile's queries -> a bit per query in a table of RANGE keys -> keys with any bit, in ascending order

A program makes the list of one tile, RANGE keys after the other. Bits are set by atomic or, in any order, so lists are
the same at every call.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.compat import barrier
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.best import add

RANGE = gl.constexpr(32768)  # keys of the table, 4 bytes each
CHOICES, WORDS = gl.constexpr(2048), gl.constexpr(4096)  # of a query, and of the table, that are read at once
WARPS = 16
# Set bits $2 of word $1 of the table, which is the first of what the kernel has in shared memory; none if $2 is 0.
_MARK = gl.constexpr("""
{
    .reg .pred %taken;
    .reg .b32 %at;
    setp.ne.u32 %taken, $2, 0;
    mov.u32 %at, global_smem;
    mad.lo.u32 %at, $1, 4, %at;
    @%taken red.shared.or.b32 [%at], $2;
    mov.b32 $0, $1;
}
""")


@gluon.jit
def _chosen(p_row, place, count, start, distance, slots, layout: gl.constexpr):
    """Return choices of a query of the tile from place `start` on, -1 for none."""
    o_s = start + gl.arange(0, CHOICES, layout)
    return gl.load(p_row + place * distance + o_s, mask=(o_s < slots) & (place < count), other=-1)


@kernel_launcher
@gluon.jit(do_not_specialize=["heads", "slots", "capacity"])
def _token_grouped_lists_kernel(
    p_chosen,  # (T, Hs, n) int32 contiguous
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32
    p_lists,  # (tiles, Hs, capacity) int32: keys in ascending order
    p_marks,  # (tiles, Hs, capacity) int32: a bit per query
    p_counts,  # (tiles, Hs) int32
    heads,
    slots,
    capacity,
):
    by_choice: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    by_word: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    table = gl.allocate_shared_memory(gl.int32, [RANGE // WORDS, WORDS], rows)
    i_list = gl.program_id(0)
    i_tile, i_head = i_list // heads, i_list % heads
    first, count = gl.load(p_tiles + 2 * i_tile), gl.load(p_tiles + 2 * i_tile + 1)
    used = gl.load(p_position + first + count - 1) + 1  # keys that the tile's last query sees
    p_chosen += (first.to(gl.int64) * heads + i_head) * slots
    p_lists += i_list.to(gl.int64) * capacity
    p_marks += i_list.to(gl.int64) * capacity
    nothing = gl.zeros([WORDS], gl.int32, by_word)
    for i_word in gl.static_range(RANGE // WORDS):
        table.index(i_word).store(nothing)
    barrier()
    total = 0
    for begin in range(0, used, RANGE):
        for start in range(0, slots, CHOICES):
            key = _chosen(p_chosen, 0, count, start, slots * heads, slots, by_choice)
            for place in range(count):
                following = _chosen(p_chosen, place + 1, count, start, slots * heads, slots, by_choice)
                position = gl.load(p_position + first + place)
                seen = (key >= begin) & (key <= position) & (key - begin < RANGE)
                bit = gl.where(seen, gl.full([CHOICES], 1, gl.int32, by_choice) << place, 0)
                gl.inline_asm_elementwise(_MARK, "=r,r,r", [key - begin, bit], dtype=gl.int32, is_pure=False, pack=1)
                key = following
        barrier()
        for i in range(gl.cdiv(gl.minimum(used - begin, RANGE), WORDS)):
            marks = table.index(i).load(by_word)
            table.index(i).store(nothing)
            found = (marks != 0).to(gl.int32)
            at = total + gl.associative_scan(found, 0, add) - 1
            key = begin + i * WORDS + gl.arange(0, WORDS, by_word)
            gl.store(p_lists + at, key, mask=found != 0)
            gl.store(p_marks + at, marks, mask=found != 0)
            total += gl.sum(found, 0)
        barrier()
    gl.store(p_counts + i_list, total)
