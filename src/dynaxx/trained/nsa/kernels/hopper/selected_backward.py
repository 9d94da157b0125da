# SPDX-License-Identifier: Apache-2.0
"""dq of selected attention by query for Hopper, in Gluon; roles, tiles and names are those of `selected`.

producer warp        q, do of a tile; then k, v of the union of blocks
consumer warpgroup   64 rows: scores, dp -> ds -> dq += ds k
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.compat import tma_add, tma_load, tma_store
from dynaxx.kernels.primitives.hopper.descriptors import LOG2E
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.query_unions import Unions
from dynaxx.trained.nsa.kernels.hopper.selected_tiles import (
    descriptor,
    feed_blocks,
    places,
    product_layout,
    registers,
    stages,
)
from dynaxx.trained.nsa.spans import NsaSpans

LOG2E_ = gl.constexpr(LOG2E)


@gluon.jit
def _produce(
    blocks, CONSUMERS: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    (
        q_desc, do_desc, k_desc, v_desc, q_buffers, do_buffers, k_buffers, v_buffers, q_full, full, empty, p_starts,
        count, first_t, i_head, i_hk,
    ) = blocks  # fmt: skip
    mbarrier.expect(q_full.index(0), 2 * CONSUMERS * q_desc.block_type.nbytes)
    for u in gl.static_range(CONSUMERS):
        at = [first_t + u * POSITIONS, i_head * GROUP, 0]
        tma_load(q_desc, at, q_full.index(0), q_buffers.index(u))
        tma_load(do_desc, at, q_full.index(0), do_buffers.index(u))
    feed_blocks(k_desc, v_desc, k_buffers, v_buffers, full, empty, p_starts, count, 0, i_hk, STAGES)


@gluon.jit
def _consume(
    rows, CONSUMER: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    (
        dq_desc, q_buffers, do_buffers, k_buffers, v_buffers, q_full, full, empty, p_rows, p_last_key, p_starts,
        p_members, count, first_t, i_head, queries, q_heads, scale,
    ) = rows  # fmt: skip
    D: gl.constexpr = dq_desc.block_type.shape[2]
    EVERY: gl.constexpr = (1 << POSITIONS) - 1
    s_layout: gl.constexpr = product_layout(KV_BLOCK)
    acc_layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    position, member, columns = places(s_layout, GROUP)
    first_t += CONSUMER * POSITIONS
    t = first_t + position
    last_key = gl.load(p_last_key + t, mask=t < queries, other=-1)
    nearest = gl.min(last_key, 0)
    p_row = p_rows + (t.to(gl.int64) * q_heads + i_head * GROUP + member) * 2
    lse = gl.load(p_row, mask=t < queries, other=float("inf")) * LOG2E_
    delta = gl.load(p_row + 1, mask=t < queries, other=0.0)
    dq = gl.zeros([ROWS, D], gl.float32, acc_layout)
    q = q_buffers.index(CONSUMER).reshape([ROWS, D])
    do = do_buffers.index(CONSUMER).reshape([ROWS, D])
    mbarrier.wait(q_full.index(0), 0)
    for i_block in range(count):
        members = (gl.load(p_members + i_block) >> (CONSUMER * POSITIONS)) & EVERY
        start = gl.load(p_starts + i_block)
        stage = i_block % STAGES
        mbarrier.wait(full.index(stage), (i_block // STAGES) & 1)
        if members != 0:
            k = k_buffers.index(stage).reshape([KV_BLOCK, D])
            v = v_buffers.index(stage).reshape([KV_BLOCK, D])
            zero = gl.zeros([ROWS, KV_BLOCK], gl.float32, s_layout)
            s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp_token = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[s_token])
            weights = gl.exp2(scores * (scale * LOG2E_) - lse[:, None])
            if (members != EVERY) | (start + KV_BLOCK - 1 > nearest):
                limit = gl.where(((members >> position) & 1) != 0, last_key, -1) - start
                weights = gl.where(columns[None, :] <= limit[:, None], weights, 0.0)
            dp = warpgroup_mma_wait(0, deps=[dp_token])
            ds = gl.convert_layout((weights * (dp - delta[:, None])).to(dq_desc.dtype), p_layout)
            dq_token = warpgroup_mma(ds, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq_token])
        mbarrier.arrive(empty.index(stage), count=1)
    q.store((dq * scale).to(dq_desc.dtype))  # q is not read again, so its buffer can hold the result
    fence_async_shared()
    if ADD:
        tma_add(dq_desc, [first_t, i_head * GROUP, 0], q_buffers.index(CONSUMER))
    else:
        tma_store(dq_desc, [first_t, i_head * GROUP, 0], q_buffers.index(CONSUMER))
    tma.store_wait(0)


@kernel_launcher
@gluon.jit(do_not_specialize=["queries", "heads", "heads_per_kv"])
def _selected_hopper_bwd_dq_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, p_rows, p_last_key, p_starts, p_members, p_counts,
    queries, heads, heads_per_kv, scale,
    SLOTS: gl.constexpr,  # slots in a tile's union
    CONSUMERS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    ADD: gl.constexpr,  # add to the contents of dq
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    POSITIONS: gl.constexpr = ROWS // GROUP  # positions per consumer
    i_program = gl.program_id(0)
    i_head = i_program % heads
    count = gl.load(p_counts + i_program)
    p_starts += i_program.to(gl.int64) * SLOTS
    p_members += i_program.to(gl.int64) * SLOTS
    first_t = i_program // heads * (CONSUMERS * POSITIONS)
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[2]
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, POSITIONS, GROUP, D], q_desc.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, POSITIONS, GROUP, D], do_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, KV_BLOCK, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, KV_BLOCK, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    rows = (
        dq_desc, q_buffers, do_buffers, k_buffers, v_buffers, q_full, full, empty, p_rows, p_last_key, p_starts,
        p_members, count, first_t, i_head, queries, heads * GROUP, scale,
    )  # fmt: skip
    blocks = (
        q_desc, do_desc, k_desc, v_desc, q_buffers, do_buffers, k_buffers, v_buffers, q_full, full, empty, p_starts,
        count, first_t, i_head, i_head // heads_per_kv,
    )  # fmt: skip
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (rows, 0, POSITIONS, GROUP, KV_BLOCK, STAGES, ADD)),
            (_consume, (rows, 1, POSITIONS, GROUP, KV_BLOCK, STAGES, ADD)),
            (_consume, (rows, 2, POSITIONS, GROUP, KV_BLOCK, STAGES, ADD)),
            (_produce, (blocks, CONSUMERS, POSITIONS, GROUP, STAGES)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (rows, 0, POSITIONS, GROUP, KV_BLOCK, STAGES, ADD)),
            (_consume, (rows, 1, POSITIONS, GROUP, KV_BLOCK, STAGES, ADD)),
            (_produce, (blocks, CONSUMERS, POSITIONS, GROUP, STAGES)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def backward_dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, union: Unions, spans: NsaSpans, consumers: int,
    scale: float, others_dq: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return dq (T, Hq, D), or add it to `others_dq` and return that.

    `rows` come from `row_pairs`; unions have `consumers` times 64 rows.
    """
    queries, q_heads, dim = q.shape
    tiles, heads, slots = union.starts.shape
    group_size, size = q_heads // heads, spans.sizes.slc_block
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if others_dq is None else others_dq
    tile, keys = (64 // group_size, group_size, dim), (1, size, dim)
    _selected_hopper_bwd_dq_kernel[(tiles * heads,)](
        descriptor(q, tile),
        descriptor(do, tile),
        descriptor(k.transpose(0, 1), keys),
        descriptor(v.transpose(0, 1), keys),
        descriptor(dq, tile),
        rows,
        spans.last_key,
        union.starts,
        union.members,
        union.counts,
        queries=queries,
        heads=heads,
        heads_per_kv=heads // k.shape[1],
        scale=scale,
        SLOTS=slots,
        CONSUMERS=consumers,
        GROUP=group_size,
        KV_BLOCK=size,
        STAGES=stages(consumers, 2, dim, size),
        ADD=others_dq is not None,
        **registers(consumers),
    )
    return dq
