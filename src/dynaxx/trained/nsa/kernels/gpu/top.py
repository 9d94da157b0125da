# SPDX-License-Identifier: Apache-2.0
"""Top-k: select the forced blocks and the best others of a row of scores, in ascending order.

    scores (own + behind) -> integer keys -> bisection for the n-th best key -> ties by position -> compacted indices

The kernel does not sort. It bisects the range of the n-th best key until n blocks are left. A row of up to 1,024 blocks
takes one warp.

Legend: T queries of a chunk, Hs selection heads, C blocks, n selected blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.primitives.numbers import ordered_bits
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu import config
from dynaxx.trained.nsa.spans import NsaSizes

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _bounds(key, need, WIDTH: tl.constexpr):
    """Return two bounds for the need-th best key: it is at least the first and less than the second.

    The keys are split into GROUPS groups. The need-th best of their maxima is a lower bound, because `need` keys reach
    it.
    """
    GROUPS: tl.constexpr = 32
    above = tl.max(key, 0) + 1
    least = tl.full([], 1, tl.uint32)
    if WIDTH > GROUPS:
        FOURS: tl.constexpr = min(4, WIDTH // GROUPS)  # keys that a thread loads at once
        some = tl.max(tl.reshape(key, [WIDTH // GROUPS // FOURS, GROUPS, FOURS]), 2)
        best = tl.sort(tl.max(some, 0))
        at = tl.arange(0, GROUPS) == GROUPS - need  # all False if need > GROUPS
        least = tl.maximum(tl.sum(tl.where(at, best, 0), 0).to(tl.uint32), 1)
    return least, above


@triton.jit
def _running(chosen, WIDTH: tl.constexpr):
    """Return the running count of chosen places. Scans are slow, so one word holds the counts of four runs."""
    RUN: tl.constexpr = 128
    if WIDTH <= RUN:
        running = tl.cumsum(chosen.to(tl.int32), 0)
    else:
        BYTES: tl.constexpr = min(4, WIDTH // RUN)
        byte = tl.arange(0, BYTES)[None, :]
        words = tl.sum(tl.reshape(chosen.to(tl.int32), [WIDTH // (BYTES * RUN), BYTES, RUN]) << 8 * byte[:, :, None], 1)
        inside = (tl.cumsum(words, 1)[:, None, :] >> 8 * byte[:, :, None]) & 255
        total = tl.sum(words, 1)[:, None]  # totals of four runs
        before = byte * 0
        for i in tl.static_range(BYTES - 1):
            before += tl.where(byte > i, (total >> 8 * i) & 255, 0)
        if WIDTH > BYTES * RUN:
            every = tl.sum((total >> 8 * byte) & 255, 1)
            before += (tl.cumsum(every, 0) - every)[:, None]
        running = tl.reshape(inside + before[:, :, None], [WIDTH])
    return running


@triton.jit
def _choose(
    p_own,
    p_next,
    p_out,
    blocks,
    seen,
    tokens,
    slots,
    first_blocks,
    local_blocks,
    PER_TOKEN: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # at least seen
    RAW: tl.constexpr,
    MAX: tl.constexpr,
):
    """Select the blocks of one row of scores: the forced ones, then the best."""
    block = tl.arange(0, WIDTH)
    free = (block >= first_blocks) & (block < seen - local_blocks)
    scored = tl.cdiv(tokens, PER_BLOCK)  # number of blocks in which a visible token starts
    near = block // 4 * 4 < seen  # in fours, for wide loads; the row length is a multiple of four
    score = tl.where(block < scored, tl.load(p_own + block, mask=near, other=0.0), LOWEST if RAW else 0.0)
    if PER_TOKEN > 1:
        behind = tl.load(p_next + block, mask=near, other=0.0)
        behind = tl.where((block > 0) & (block <= scored), behind, 0.0)
        score = tl.maximum(score, behind) if MAX else score + behind
    key = ordered_bits(score) if RAW else score.to(tl.uint32, bitcast=True) + 1  # ordered, because no score is negative
    key = tl.where(free, key, 0).to(tl.uint32)  # 0 is less than the key of any score
    forced = tl.minimum(seen, first_blocks) + tl.maximum(seen - tl.maximum(first_blocks, seen - local_blocks), 0)
    need = tl.minimum(seen, slots) - forced  # number of free blocks to select
    least, above = _bounds(key, need, WIDTH)  # invariant: least <= need-th best key < above
    count = tl.sum((key >= least).to(tl.int32), 0)
    while (count > need) & (above - least > 1):
        middle = least + (above - least) // 2
        enough = tl.sum((key >= middle).to(tl.int32), 0)
        if enough >= need:
            least = middle
            count = enough
        else:
            above = middle
    if count > need:  # of equal keys, keep the first ones
        ties = key == least
        rest = need - (count - tl.sum(ties.to(tl.int32), 0))
        key = tl.where(ties & (_running(ties, WIDTH) > rest), 0, key)
    chosen = (key >= least) | ((block < seen) & ((block < first_blocks) | (block >= seen - local_blocks)))
    tl.store(p_out + _running(chosen, WIDTH) - 1, block, mask=chosen)


@kernel_launcher
@triton.jit(do_not_specialize=["first_row", "heads", "slots", "first_blocks", "local_blocks"])
def _top_blocks_kernel(
    p_own,
    p_next,
    p_indices,  # (all queries, Hs, n) int32
    p_num_blocks,
    p_num_cmp,
    first_row,
    heads,
    blocks,
    slots,
    first_blocks,
    local_blocks,
    PER_TOKEN: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # C as a power of two
    NARROWER: tl.constexpr,  # largest divisor of WIDTH for rows that see few blocks
    WIDE_SLOTS: tl.constexpr,  # n as a power of two
    RAW: tl.constexpr,
    MAX: tl.constexpr,
):
    """Select the blocks of one row of scores, in a tile no wider than necessary."""
    row = tl.program_id(0).to(tl.int64)
    t = first_row + row // heads
    seen, tokens = tl.load(p_num_blocks + t), tl.load(p_num_cmp + t)
    p_out = p_indices + (first_row.to(tl.int64) * heads + row) * slots
    slot = tl.arange(0, WIDE_SLOTS)
    tl.store(p_out + slot, slot * 0 - 1, mask=(slot >= seen) & (slot < slots))
    p_own += row * blocks
    p_next += row * blocks
    if seen * 4 <= WIDTH and NARROWER >= 4:
        _choose(p_own, p_next, p_out, blocks, seen, tokens, slots, first_blocks, local_blocks,
                PER_TOKEN, PER_BLOCK, WIDTH // NARROWER, RAW, MAX)  # fmt: skip
    elif seen * 2 <= WIDTH and NARROWER >= 2:
        _choose(p_own, p_next, p_out, blocks, seen, tokens, slots, first_blocks, local_blocks,
                PER_TOKEN, PER_BLOCK, WIDTH // 2, RAW, MAX)  # fmt: skip
    else:
        _choose(p_own, p_next, p_out, blocks, seen, tokens, slots, first_blocks, local_blocks,
                PER_TOKEN, PER_BLOCK, WIDTH, RAW, MAX)  # fmt: skip


def strides_per(sizes: NsaSizes) -> tuple[int, int]:
    """Return the strides per compressed token and per block."""
    return sizes.cmp_block // sizes.cmp_stride, sizes.slc_block // sizes.cmp_stride


def top_blocks(
    own: Tensor,
    behind: Tensor,
    indices: Tensor,
    num_blocks: Tensor,
    num_cmp: Tensor,
    first_row: int,
    sizes: NsaSizes,
    raw: bool = False,
) -> None:
    """Select the blocks of some queries by their scores.

    Args:
        own: (T, Hs, C) fp32, C a multiple of 16; see `nsa.select.ScoreTensors`.
        behind: (T, Hs, C) fp32; see `nsa.select.ScoreTensors`.
        indices: (all queries, Hs, n) int32, receives the selection.
        num_blocks: (all queries,) int32, number of blocks that each query sees.
        num_cmp: (all queries,) int32, number of compressed tokens that each query sees.
        first_row: first row of these queries.
        sizes: sizes of the branches.
        raw: whether scores may be negative.
    """
    count, heads, blocks = own.shape
    width = triton.next_power_of_2(blocks)
    per_token, per_block = strides_per(sizes)
    _top_blocks_kernel[(count * heads,)](
        own,
        behind,
        indices,
        num_blocks,
        num_cmp,
        first_row=first_row,
        heads=heads,
        blocks=blocks,
        slots=sizes.slc_count,
        first_blocks=sizes.first_blocks,
        local_blocks=sizes.local_blocks,
        PER_TOKEN=per_token,
        PER_BLOCK=per_block,
        WIDTH=width,
        NARROWER=min(4, max(1, width // 128)),
        WIDE_SLOTS=triton.next_power_of_2(sizes.slc_count),
        RAW=raw,
        MAX=sizes.pool == "max",
        num_warps=config.top_warps(width),
    )
