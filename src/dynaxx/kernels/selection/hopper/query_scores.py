# SPDX-License-Identifier: Apache-2.0
"""Scores of one query per row of q blocks against every key, summed to blocks, on Hopper.

    producer warp            places -> a kv block of keys by TMA, STAGES blocks ahead
    2 consumer warpgroups    128 queries each, in halves: q k.T of one half while the other's exponentials are summed;
                             a half ends with the last block of which one of its queries sees something

A program has 256 queries of one kv head in shared memory, such as the (row, q head) pairs of 64 rows of q blocks with 4
q heads, so that a chunk of a prompt reads its keys once. It processes a run of kv blocks, see `blocks_of_a_program`.

Legend: B batch; Hq, Hk query and kv heads; R rows of q blocks; C kv blocks; D head_dim; G q heads per kv head.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.compat import barrier, tma_load
from dynaxx.kernels.device import processors
from dynaxx.kernels.primitives.hopper.descriptors import gluon_rows
from dynaxx.kernels.primitives.hopper.signals import barriers, hold_before_wait
from dynaxx.kernels.primitives.hopper.tiles import tile_of_parts
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout import BlockGrid

LOG2_E = gl.constexpr(math.log2(math.e))
HALF = gl.constexpr(64)  # queries of one product: wgmma's M
QUERIES = 256  # queries per program
STAGES = 3  # kv blocks in flight
COLUMNS = 64  # columns of keys per load, as wide as TMA swizzles
SIZES = ["rows", "first_row", "seqlen_k", "kv_blocks", "kv_heads", "group_size", "offset", "q_block", "tiles"]


class ScoreBuffers(NamedTuple):
    """Shared memory between the producer and the consumers, and its barriers."""

    q: Any  # [4, HALF, D]
    k: Any
    full: Any
    empty: Any


class ScoreSizes(NamedTuple):
    """The kv blocks of a program, the row of q blocks that a query belongs to, and how far it sees."""

    begin: Any
    stop: Any
    kv_blocks: Any
    rows: Any
    first_row: Any
    seqlen_k: Any
    group_size: Any
    offset: Any
    q_block: Any


@gluon.jit
def _lines():
    """Return the index of this program's queries among those of a kv head: the longest rows come first."""
    return gl.num_programs(1) - 1 - gl.program_id(1)


@gluon.jit
def _score(logits, p_row, seen, known, tile, first_hidden, KV_BLOCK: gl.constexpr):
    """Write the log of the sum of exponentials of a block's visible keys, for 64 queries.

    `logits` [HALF, KV_BLOCK] are products with block `tile`, `p_row` the addresses of the queries' scores, `seen` the
    keys that each query sees. Blocks from `first_hidden` on have keys that some query does not see.
    """
    if tile >= first_hidden:
        o_n = tile * KV_BLOCK + gl.arange(0, KV_BLOCK, gl.SliceLayout(0, logits.type.layout))
        logits = gl.where(o_n[None, :] < seen[:, None], logits, float("-inf"))
    best = gl.max(logits, 1)
    shift = gl.where(best == float("-inf"), 0.0, best)
    total = hold_before_wait(
        gl.sum(gl.exp2(logits * LOG2_E - (shift * LOG2_E)[:, None]), 1)
    )  # before the wait for other products
    score = shift + gl.log2(gl.where(total == 0, 1.0, total)) / LOG2_E
    gl.store(p_row + tile, gl.where(total == 0, float("-inf"), score), mask=known)


@gluon.jit
def _half(sizes, first, p_scores, layout: gl.constexpr):
    """Return what 64 queries from `first` on see.

    Returns:
        (p_row, seen, known, first_hidden, stop): see `_score`; `stop` ends the blocks of which a query sees something.
    """
    rows, group_size = sizes.rows, sizes.group_size
    i_query = first + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    i_row, i_head = i_query // group_size, gl.program_id(2).to(gl.int64) * group_size + i_query % group_size
    p_row = p_scores + (i_head * rows + i_row) * sizes.kv_blocks
    reach = sizes.first_row * sizes.q_block + sizes.offset
    seen = gl.minimum(reach + (i_row + 1) * sizes.q_block, sizes.seqlen_k)
    least = gl.minimum(reach + (first // group_size + 1) * sizes.q_block, sizes.seqlen_k)
    last_row = gl.minimum((first + HALF - 1) // group_size, rows - 1)
    most = gl.minimum(reach + (last_row + 1) * sizes.q_block, sizes.seqlen_k)
    KV_BLOCK: gl.constexpr = layout.instr_shape[1]
    stop = (gl.maximum(most, 0) + KV_BLOCK - 1) // KV_BLOCK
    stop = gl.where(first // group_size < rows, gl.minimum(stop, sizes.stop), 0)
    return p_row, seen, i_row < rows, gl.maximum(least, 0) // KV_BLOCK, stop


@gluon.jit
def _consume(
    buffers, sizes, p_scores,
    CONSUMER: gl.constexpr, KV_BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Score the program's blocks for 128 of its queries; the left half sees fewer blocks than the right half."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_BLOCK, 16])
    first = (_lines() * 4 + CONSUMER * 2) * HALF
    p_left, left_seen, left_known, left_hidden, left_stop = _half(sizes, first, p_scores, layout)
    p_right, right_seen, right_known, right_hidden, right_stop = _half(sizes, first + HALF, p_scores, layout)
    both = gl.maximum(left_stop, sizes.begin)
    one = gl.maximum(right_stop, both)
    zero = gl.zeros([HALF, KV_BLOCK], gl.float32, layout)
    for tile in range(sizes.begin, both):
        stage = (tile - sizes.begin) % STAGES
        mbarrier.wait(buffers.full.index(stage), ((tile - sizes.begin) // STAGES) & 1)
        k = tile_of_parts(buffers.k, stage, KV_BLOCK, D).permute((1, 0))
        left = warpgroup_mma(buffers.q.index(2 * CONSUMER), k, zero, use_acc=False, is_async=True)
        right = warpgroup_mma(buffers.q.index(2 * CONSUMER + 1), k, zero, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(1, deps=[left])
        _score(logits, p_left, left_seen, left_known, tile, left_hidden, KV_BLOCK)
        logits = warpgroup_mma_wait(0, deps=[right])
        mbarrier.arrive(buffers.empty.index(stage), count=1)
        _score(logits, p_right, right_seen, right_known, tile, right_hidden, KV_BLOCK)
    for tile in range(both, one):
        stage = (tile - sizes.begin) % STAGES
        mbarrier.wait(buffers.full.index(stage), ((tile - sizes.begin) // STAGES) & 1)
        k = tile_of_parts(buffers.k, stage, KV_BLOCK, D).permute((1, 0))
        right = warpgroup_mma(buffers.q.index(2 * CONSUMER + 1), k, zero, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[right])
        mbarrier.arrive(buffers.empty.index(stage), count=1)
        _score(logits, p_right, right_seen, right_known, tile, right_hidden, KV_BLOCK)
    for tile in range(one, sizes.stop):
        stage = (tile - sizes.begin) % STAGES
        mbarrier.wait(buffers.full.index(stage), ((tile - sizes.begin) // STAGES) & 1)
        mbarrier.arrive(buffers.empty.index(stage), count=1)


@gluon.jit
def _produce(
    buffers, sizes, k_desc, p_places, kv_heads,
    KV_BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PLACED: gl.constexpr,
):  # fmt: skip
    """Load the keys of the program's blocks."""
    PARTS: gl.constexpr = D // k_desc.block_type.shape[3]
    i_b, i_h = gl.program_id(2) // kv_heads, gl.program_id(2) % kv_heads
    for tile in range(sizes.begin, sizes.stop):
        i_load = tile - sizes.begin
        stage = i_load % STAGES
        place = tile
        if PLACED:
            place = gl.load(p_places + tile)
        mbarrier.wait(buffers.empty.index(stage), (i_load // STAGES + 1) & 1)
        mbarrier.expect(buffers.full.index(stage), PARTS * k_desc.block_type.nbytes)
        for i_part in gl.static_range(PARTS):
            at = [i_b, i_h, place * KV_BLOCK, i_part * k_desc.block_type.shape[3]]
            buffer = buffers.k.index(stage * PARTS + i_part)
            tma_load(k_desc, at, buffers.full.index(stage), buffer)


@kernel_launcher
@gluon.jit(do_not_specialize=SIZES)
def _query_scores_hopper_kernel(
    p_q,  # (B, Hq, R, D) contiguous, multiplied by the softmax scale
    k_desc,  # (B, Hk, N, D)
    p_scores,  # (B, Hq, R, C) fp32 contiguous
    p_places,  # (C,) int32: block of k that holds each block, if PLACED
    rows,
    first_row,
    seqlen_k,
    kv_blocks,
    kv_heads,
    group_size,
    offset,
    q_block,
    tiles,  # kv blocks per program
    PLACED: gl.constexpr,
    CAUSAL: gl.constexpr,
    KV_BLOCK: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    PARTS: gl.constexpr = D // k_desc.block_type.shape[3]
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    q_buffers = gl.allocate_shared_memory(dtype, [4, HALF, D], q_layout)
    k_buffers = gl.allocate_shared_memory(
        dtype, [STAGES * PARTS, 1, 1, KV_BLOCK, k_desc.block_type.shape[3]], k_desc.layout
    )
    buffers = ScoreBuffers(q_buffers, k_buffers, barriers(STAGES, 1), barriers(STAGES, 2))
    if not CAUSAL:
        offset = seqlen_k  # every query sees every key
    last = (first_row + gl.minimum(rows, ((_lines() + 1) * (4 * HALF) + group_size - 1) // group_size)) * q_block
    seen = gl.maximum(gl.minimum(last + offset, seqlen_k), 0)
    begin = gl.program_id(0) * tiles
    stop = gl.minimum(begin + tiles, (seen + KV_BLOCK - 1) // KV_BLOCK)
    if begin < stop:
        rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
        o_d = gl.arange(0, D, gl.SliceLayout(0, rows_layout))
        heads = gl.program_id(2).to(gl.int64) * group_size
        for i_half in gl.static_range(4):
            o_m = (_lines() * 4 + i_half) * HALF + gl.arange(0, HALF, gl.SliceLayout(1, rows_layout))
            p_from = p_q + ((heads + o_m % group_size) * rows + o_m // group_size) * D
            known = (o_m // group_size < rows)[:, None]
            q_buffers.index(i_half).store(gl.load(p_from[:, None] + o_d[None, :], mask=known, other=0.0))
        fence_async_shared()
        barrier()
    sizes = ScoreSizes(begin, stop, kv_blocks, rows, first_row, seqlen_k, group_size, offset, q_block)
    gl.warp_specialize([
        (_consume, (buffers, sizes, p_scores, 0, KV_BLOCK, D, STAGES)),
        (_consume, (buffers, sizes, p_scores, 1, KV_BLOCK, D, STAGES)),
        (_produce, (buffers, sizes, k_desc, p_places, kv_heads, KV_BLOCK, D, STAGES, PLACED)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def blocks_of_a_program(kv_blocks: int, lines: int, heads: int, processors: int) -> int:
    """Return the kv blocks that a program processes.

    One line of queries per head, as a chunk of a prompt has, fills the GPU once. Several lines differ in length under a
    causal mask, so they get several programs per multiprocessor.

    Args:
        kv_blocks: number of kv blocks.
        lines: number of programs that the queries of a kv head need.
        heads: number of kv heads of all batch entries.
        processors: number of multiprocessors.
    """
    if lines == 1:
        return -(-kv_blocks // max(1, processors // heads))
    return max(4, min(32, kv_blocks * lines * heads // (4 * processors)))


def query_scores(
    queries: Tensor,
    k: Tensor,
    first_row: int,
    grid: BlockGrid,
    places: Tensor | None = None,
    q_block: int | None = None,
) -> Tensor:
    """Return scores like `kernels.selection.triton.query_scores`, of all blocks of which a row sees something."""
    (batch, q_heads, rows, head_dim), kv_heads, kv_block = queries.shape, k.shape[2], grid.block_size[1]
    scores = torch.empty(batch, q_heads, rows, grid.kv_blocks, device=k.device, dtype=torch.float32)
    if not scores.numel():
        return scores
    group_size = q_heads // kv_heads
    lines, heads = -(-rows * group_size // QUERIES), batch * kv_heads
    tiles = blocks_of_a_program(grid.kv_blocks, lines, heads, processors(k.device))
    _query_scores_hopper_kernel[(-(-grid.kv_blocks // tiles), lines, heads)](
        queries.contiguous(),
        gluon_rows(k, kv_block, COLUMNS),
        scores,
        scores if places is None else places,
        rows=rows,
        first_row=first_row,
        seqlen_k=grid.seqlen_k,
        kv_blocks=grid.kv_blocks,
        kv_heads=kv_heads,
        group_size=group_size,
        offset=grid.offset,
        q_block=q_block or grid.block_size[0],
        tiles=tiles,
        PLACED=places is not None,
        CAUSAL=grid.causal,
        KV_BLOCK=kv_block,
        D=head_dim,
        STAGES=STAGES,
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        num_warps=4,
        maxnreg=168,
    )
    return scores
