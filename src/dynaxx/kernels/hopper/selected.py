# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Selected attention by query for Hopper, in Gluon: warp-specialised, one producer warp and a few consumers.

A consumer warpgroup owns the 64 rows of 64 / group neighbouring positions. The producer feeds the union of the blocks
of all consumers' positions by TMA, each once; a consumer passes over those that none of its own positions selected.

T queries, M keys, Hq / Hk / Hs query, kv and selection heads; D head_dim of q, k and v.
"""

from functools import lru_cache

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dynaxx.kernels.hopper.forward import LOG2E
from dynaxx.kernels.hopper.forward_consume import LN2, ROWS
from dynaxx.kernels.triton.launch import as_template, nowhere, rebased
from dynaxx.kernels.triton.light import light_launch
from dynaxx.kernels.triton.native_index import Unions
from dynaxx.layout.native import NativeSpans

SHARED_ROWS = 896  # of 256 bytes, in shared memory


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_starts, count, first_t, i_head,
    i_hk, CONSUMERS: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(q_full.index(0), CONSUMERS * q_desc.block_type.nbytes)
    for u in gl.static_range(CONSUMERS):
        at = [first_t + u * POSITIONS, i_head * GROUP, 0]
        tma.async_copy_global_to_shared(q_desc, at, q_full.index(0), q_buffers.index(u))
    feed_blocks(k_desc, v_desc, k_buffers, v_buffers, full, empty, p_starts, count, i_hk, STAGES)


@gluon.jit
def feed_blocks(
    k_desc, v_desc, k_buffers, v_buffers, full, empty, p_starts, count, i_hk, STAGES: gl.constexpr
):  # fmt: skip
    """Load the keys and values of each block of a union, in its order."""
    for i_block in range(count):
        start = gl.load(p_starts + i_block)
        stage = i_block % STAGES
        mbarrier.wait(empty.index(stage), ((i_block // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [i_hk, start, 0], full.index(stage), k_buffers.index(stage))
        tma.async_copy_global_to_shared(v_desc, [i_hk, start, 0], full.index(stage), v_buffers.index(stage))


@gluon.jit
def _consume(
    out_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse, p_last_key, p_starts, p_members,
    count, first_t, i_head, queries, scale_log2,
    CONSUMER: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = out_desc.block_type.shape[2]
    EVERY: gl.constexpr = (1 << POSITIONS) - 1
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_BLOCK, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, KV_BLOCK, gl.SliceLayout(0, s_layout))
    first_t += CONSUMER * POSITIONS
    position = o_row // GROUP
    t = first_t + position
    last_key = gl.load(p_last_key + t, mask=t < queries, other=-1)
    nearest = gl.min(last_key, 0)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([ROWS, D], gl.float32, acc_layout)
    q = q_buffers.index(CONSUMER).reshape([ROWS, D])
    mbarrier.wait(q_full.index(0), 0)
    for i_block in range(count):
        members = (gl.load(p_members + i_block) >> (CONSUMER * POSITIONS)) & EVERY
        start = gl.load(p_starts + i_block)
        stage = i_block % STAGES
        mbarrier.wait(full.index(stage), (i_block // STAGES) & 1)
        if members != 0:
            k = k_buffers.index(stage).reshape([KV_BLOCK, D])
            zero = gl.zeros([ROWS, KV_BLOCK], gl.float32, s_layout)
            s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[s_token])
            if (members != EVERY) | (start + KV_BLOCK - 1 > nearest):
                limit = gl.where(((members >> position) & 1) != 0, last_key, -1) - start
                scores = gl.where(columns[None, :] <= limit[:, None], scores, -float("inf"))
            new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
            shift = gl.where(new_max == -float("inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - shift)
            weights = gl.exp2(scores * scale_log2 - shift[:, None])
            row_max = new_max
            row_sum = row_sum * rescale + gl.sum(weights, 1)
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
            p = gl.convert_layout(weights.to(out_desc.dtype), p_layout)
            v = v_buffers.index(stage).reshape([KV_BLOCK, D])
            acc_token = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(empty.index(stage), count=1)
    hidden = row_sum == 0
    row_sum = gl.where(hidden, 1.0, row_sum)
    lse = gl.where(hidden, -float("inf"), (row_max + gl.log2(row_sum)) * LN2)
    h = i_head * GROUP + o_row % GROUP
    gl.store(p_lse + h.to(gl.int64) * queries + t, lse, mask=t < queries)
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, acc_layout))[:, None]
    q.store(acc.to(out_desc.dtype))  # q is read no more: its buffer carries the result out
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [first_t, i_head * GROUP, 0], q_buffers.index(CONSUMER))
    tma.store_wait(0)


@light_launch
@gluon.jit(do_not_specialize=["queries", "heads", "heads_per_kv"])
def _selected_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, p_lse, p_last_key, p_starts, p_members, p_counts,
    p_taken,  # (1,) int32, 0 where nothing is to be done; not read without CHOSEN
    queries, heads, heads_per_kv, scale_log2,
    SLOTS: gl.constexpr,  # of a tile's union
    CONSUMERS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    CHOSEN: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    run = True
    if CHOSEN:
        run = gl.load(p_taken) != 0
    if run:
        POSITIONS: gl.constexpr = ROWS // GROUP  # of one consumer
        i_program = gl.program_id(0)
        i_head = i_program % heads
        count = gl.load(p_counts + i_program)
        p_starts += i_program.to(gl.int64) * SLOTS
        p_members += i_program.to(gl.int64) * SLOTS
        first_t = i_program // heads * (CONSUMERS * POSITIONS)
        dtype: gl.constexpr = q_desc.dtype
        D: gl.constexpr = q_desc.block_type.shape[2]
        q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, POSITIONS, GROUP, D], q_desc.layout)
        k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, KV_BLOCK, D], k_desc.layout)
        v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, KV_BLOCK, D], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full.index(0), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        if CONSUMERS == 3:
            gl.warp_specialize([
                (_consume, (
                    out_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse, p_last_key, p_starts,
                    p_members, count, first_t, i_head, queries, scale_log2, 0, POSITIONS, GROUP, KV_BLOCK, STAGES,
                )),
                (_consume, (
                    out_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse, p_last_key, p_starts,
                    p_members, count, first_t, i_head, queries, scale_log2, 1, POSITIONS, GROUP, KV_BLOCK, STAGES,
                )),
                (_consume, (
                    out_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse, p_last_key, p_starts,
                    p_members, count, first_t, i_head, queries, scale_log2, 2, POSITIONS, GROUP, KV_BLOCK, STAGES,
                )),
                (_produce, (
                    q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_starts, count,
                    first_t, i_head, i_head // heads_per_kv, CONSUMERS, POSITIONS, GROUP, STAGES,
                )),
            ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
        else:
            gl.warp_specialize([
                (_consume, (
                    out_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse, p_last_key, p_starts,
                    p_members, count, first_t, i_head, queries, scale_log2, 0, POSITIONS, GROUP, KV_BLOCK, STAGES,
                )),
                (_consume, (
                    out_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse, p_last_key, p_starts,
                    p_members, count, first_t, i_head, queries, scale_log2, 1, POSITIONS, GROUP, KV_BLOCK, STAGES,
                )),
                (_produce, (
                    q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_starts, count,
                    first_t, i_head, i_head // heads_per_kv, CONSUMERS, POSITIONS, GROUP, STAGES,
                )),
            ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, union: Unions, spans: NativeSpans, consumers: int, scale: float,
    taken: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (T, Hq, D) and lse (Hq, T) fp32; unions of `consumers` times 64 rows, scale > 0.

    Nothing is written where `taken` (1,) int32, on the device, is 0.
    """
    queries, q_heads, dim = q.shape
    tiles, heads, slots = union.starts.shape
    group_size, size = q_heads // heads, spans.sizes.slc_block
    out = q.new_empty(q.shape)
    lse = q.new_empty(q_heads, queries, dtype=torch.float32)
    _selected_hopper_fwd_kernel[(tiles * heads,)](
        descriptor(q, (64 // group_size, group_size, dim)),
        descriptor(k.transpose(0, 1), (1, size, dim)),
        descriptor(v.transpose(0, 1), (1, size, dim)),
        descriptor(out, (64 // group_size, group_size, dim)),
        lse,
        spans.last_key,
        union.starts,
        union.members,
        union.counts,
        union.counts if taken is None else taken,
        queries=queries,
        heads=heads,
        heads_per_kv=heads // k.shape[1],
        scale_log2=scale * LOG2E,
        SLOTS=slots,
        CONSUMERS=consumers,
        GROUP=group_size,
        KV_BLOCK=size,
        STAGES=stages(consumers, 1, dim, size),
        CHOSEN=taken is not None,
        **registers(consumers),
    )
    return out, lse


def descriptor(x: Tensor, block: tuple[int, int, int]) -> TensorDescriptor:
    """Of a three-dimensional tensor with dense rows."""
    return rebased(_descriptor(x.shape, x.stride(), x.dtype, block), x)


@lru_cache(maxsize=4096)
def _descriptor(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, int, int]
) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    steps = [strides[i] if shape[i] > 1 else shape[2] for i in range(2)]  # of a single entry it is any number
    return as_template(TensorDescriptor(nowhere(dtype), list(shape), [*steps, 1], list(block), layout))


def stages(consumers: int, tiles: int, dim: int, kv_block: int) -> int:
    """Blocks of keys and values that fit beside `tiles` tiles of 64 rows of each consumer; at most 4."""
    return min(4, (SHARED_ROWS - consumers * tiles * 64 * dim // 128) // (2 * kv_block * dim // 128))


def registers(consumers: int) -> dict[str, int]:
    """How a program's warps share the register file."""
    consumer, average = (160, 128) if consumers == 3 else (240, 168)
    return {"CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": 24, "num_warps": 4, "maxnreg": average}
