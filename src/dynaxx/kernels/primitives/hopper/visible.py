# SPDX-License-Identifier: Apache-2.0
"""Element masks of a tile computed by wgmma: each thread holds its visible columns of a row as the bits of one word.

Four threads share a row; of every eight columns, thread t has 2 t and 2 t + 1. The word of a band has a closed form.
Comparing each column with both ends of the band would take twice as many instructions and exceed the registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.primitives.hopper.signals import receive_number

WORD_LAYOUT = gl.constexpr(  # layout of [64, 4] words, with rows where the four warps of a warpgroup hold them
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)


@gluon.jit
def columns_up_to(last, thread):
    """Return how many columns <= `last` a thread has in a row that extends to both sides, counted from column 0."""
    last -= 2 * thread
    return 2 * (last >> 3) + gl.minimum(last & 7, 1) + 1


@gluon.jit
def columns_between(first, last, thread):
    """Return a thread's columns in first .. last as bits, for the first 32 columns that it has."""
    below = gl.maximum(columns_up_to(first - 1, thread), 0)
    count = gl.maximum(columns_up_to(last, thread) - below, 0)
    return gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [below, count], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def columns_of_word(word, thread):
    """Return a thread's eight bits of a word of 32 columns."""
    word >>= 2 * thread
    return (word & 3) | (word >> 6 & 12) | (word >> 12 & 48) | (word >> 18 & 192)


@gluon.jit
def seen_of_block(
    first_row, numbers, at, p_bits, KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, part=None
):
    """Return words [64, 4] with the visible keys of KEYS keys of a block.

    The producer's four numbers start at `at`: first and last distance of the band, number of keys, mask id.
    The keys start at `part` of the block; if it is None, the mask id also counts the pieces of KEYS keys.
    """
    PIECES: gl.constexpr = KV_BLOCK // KEYS
    WORDS: gl.constexpr = KEYS // 32
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, WORD_LAYOUT))[:, None]
    threads = gl.arange(0, 4, gl.SliceLayout(0, WORD_LAYOUT))[None, :]
    lo, hi, keys, mask_id = (
        receive_number(numbers, at),
        receive_number(numbers, at + 1),
        receive_number(numbers, at + 2),
        receive_number(numbers, at + 3),
    )
    in_bits = lo > hi
    first = gl.where(in_bits, 0, rows - hi)
    last = gl.minimum(gl.where(in_bits, KEYS - 1, rows - lo), keys - 1)
    seen = columns_between(first, last, threads)
    if in_bits:
        by_bits = gl.zeros([64, 4], gl.int32, WORD_LAYOUT)
        if mask_id >= 0:
            if part is None:
                p_words = p_bits + ((mask_id // PIECES).to(gl.int64) * Q_BLOCK + rows) * (PIECES * WORDS)
                p_words += mask_id % PIECES * WORDS
            else:
                p_words = p_bits + (mask_id.to(gl.int64) * Q_BLOCK + rows) * (KV_BLOCK // 32) + part // 32
            for i_word in range(WORDS):
                by_bits |= columns_of_word(gl.load(p_words + i_word + threads * 0), threads) << i_word * 8
        seen &= by_bits
    return seen


@gluon.jit
def where_seen(tile, seen, other: gl.constexpr):
    """Return `tile` where the words [rows, 4] have a bit set, else `other`."""
    ROWS: gl.constexpr = tile.shape[0]
    EIGHTS: gl.constexpr = tile.shape[1] // 8
    layout: gl.constexpr = tile.type.layout
    by_thread = gl.reshape(tile, [ROWS, EIGHTS, 4, 2])
    by_eight: gl.constexpr = gl.SliceLayout(3, by_thread.type.layout)
    even_bit = 1 << 2 * gl.arange(0, EIGHTS, gl.SliceLayout(0, gl.SliceLayout(2, by_eight)))[None, :, None]
    seen = gl.expand_dims(gl.convert_layout(seen, gl.SliceLayout(1, by_eight)), 1)
    even, odd = gl.split(by_thread)
    by_thread = gl.join(_where_bit(even, seen, even_bit, other), _where_bit(odd, seen, even_bit << 1, other))
    return gl.convert_layout(gl.reshape(by_thread, [ROWS, EIGHTS * 8]), layout)


@gluon.jit
def _where_bit(tile, word, bit, other: gl.constexpr):
    """Return `tile` if `word` has `bit`, else `other`; two instructions, without LLVM's vectors of conditions."""
    tile, word = gl.broadcast(tile, word)
    tile, bit = gl.broadcast(tile, bit)
    others = gl.full(tile.shape, other, gl.float32, tile.type.layout)
    return gl.inline_asm_elementwise(
        """{
        .reg .pred has;
        .reg .b32 both;
        and.b32 both, $2, $3;
        setp.ne.b32 has, both, 0;
        selp.f32 $0, $1, $4, has;
        }""",
        "=f,f,r,r,f",
        [tile, word, bit, others],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
