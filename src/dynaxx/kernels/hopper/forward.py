# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Block-sparse attention forward for Hopper, in Gluon: warp-specialised, one producer warp and one or two consumers.

The producer feeds k and v blocks by TMA through STAGES buffers with full and empty barriers of their own. Each consumer
warpgroup owns 64 query rows and overlaps the next q @ k.T with the softmax of this block and its p @ v (wgmma, p in
registers). With q blocks of 128 the two consumers share a q block; with q blocks of 64 they are two heads of a group
where these share a layout, else there is one consumer. Blocks with an element mask go first, and alone pay for it.

TMA clips at the ends of each sequence, so a tail reads zeros and never a neighbour, and a bad index reads nothing.
Shapes: B batch, N / M queries and keys, Hq / Hk query and kv heads, D head_dim.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dynaxx.kernels.hopper.launch import tma_view
from dynaxx.kernels.triton.launch import mask_arguments, order_argument, positive_scale
from dynaxx.layout import BlockLayout

ROWS = gl.constexpr(64)  # of one consumer warpgroup: wgmma's M
LOG2E = 1.4426950408889634
LN2 = gl.constexpr(0.6931471805599453)
EVERYWHERE = gl.constexpr(1 << 20)  # a band that holds every pair of a block


@gluon.jit
def _entry(i_tile, start, count, tail):
    """The entry of the i-th tile: where the last full block may be cut by seqlen_k (`tail`), it goes first."""
    return gl.where((tail == 1) & (i_tile == 0), start + count - 1, start + i_tile - tail)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty,
    p_indices, capacity, start, count, tail, i_b, i_h, i_hk, row_q,
    CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(q_full.index(0), CONSUMERS * q_desc.block_type.nbytes)
    for u in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            q_desc, [i_b, i_h + u * STEP_HEADS, row_q + u * STEP_ROWS, 0], q_full.index(0), q_buffers.index(u)
        )
    for i_tile in range(gl.maximum(count, 1)):
        entry = _entry(i_tile, start, count, tail)
        row_k = gl.load(p_indices + entry, mask=entry < capacity, other=0) * KV_BLOCK
        stage = i_tile % STAGES
        free = ((i_tile // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [i_b, i_hk, row_k, 0], k_full.index(stage), k_buffers.index(stage))
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [i_b, i_hk, row_k, 0], v_full.index(stage), v_buffers.index(stage))


@gluon.jit
def _block_of(p_indices, p_codes, capacity, entry):
    """An entry's kv block and mask code."""
    block = gl.load(p_indices + entry, mask=entry < capacity, other=0)
    return block, gl.load(p_codes + entry, mask=entry < capacity, other=-1)


@gluon.jit
def _band_of(p_bands, num_masks, code):
    """A mask's band, with lo > hi where it has none, and its code or -1."""
    known = (code >= 0) & (code < num_masks)
    lo = gl.load(p_bands + code * 2, mask=known, other=1)
    hi = gl.load(p_bands + code * 2 + 1, mask=known, other=0)
    lo = gl.where(code == -1, -EVERYWHERE, lo)
    hi = gl.where(code == -1, EVERYWHERE, hi)
    return lo, hi, gl.where(known, code, -1)


@gluon.jit
def _hide(scores, rows, columns, p_bits, code, lo, hi, keys, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr):
    """-inf where the mask, or the end of the keys, hides a pair; rows and columns are in-block positions.

    Two selects, not one of a joint condition: that cost 20 % of a window of 1024 (registers).
    """
    scores = gl.where((columns < keys)[None, :], scores, -float("inf"))
    if lo <= hi:
        distance = rows[:, None] - columns[None, :]
        scores = gl.where((distance >= lo) & (distance <= hi), scores, -float("inf"))
    else:
        WORDS: gl.constexpr = KV_BLOCK // 32
        p_rows = p_bits + (code.to(gl.int64) * Q_BLOCK + rows) * WORDS
        known = rows * 0 + code >= 0
        c = columns[None, :]
        word = gl.load(p_rows, mask=known, other=0)[:, None] + c * 0
        for i_word in gl.static_range(1, WORDS):
            next_word = gl.load(p_rows + i_word, mask=known, other=0)
            word = gl.where(c >= i_word * 32, next_word[:, None], word)
        scores = gl.where((((word >> (c % 32)) & 1) != 0), scores, -float("inf"))
    return scores


@gluon.jit
def _softmax_step(scores, row_max, row_sum, scale_log2, MASKED: gl.constexpr):
    """Weights of this block, the new running maximum (base 2) and sum, and what to rescale earlier sums by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    shift = new_max
    if MASKED:
        shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - shift)
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    return weights, new_max, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _consume_tiles(
    acc, row_max, row_sum, weights, q, k_buffers, v_buffers, k_full, k_empty, v_full, v_empty, scale_log2,
    rows, columns, p_indices, p_codes, p_bits, p_bands, capacity, num_masks, start, count, tail, seqlen_k, begin, end,
    MASKED: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles begin..end: start q @ k.T of this one and p @ v of the one before, and do the softmax under the latter."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_BLOCK, 16])
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    for i_tile in range(begin, end):
        stage = i_tile % STAGES
        before = (i_tile - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (i_tile // STAGES) & 1)
        zero = gl.zeros([ROWS, KV_BLOCK], gl.float32, s_layout)
        k = k_buffers.index(stage).reshape([KV_BLOCK, q.shape[1]])
        s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((i_tile - 1) // STAGES) & 1)
        v = v_buffers.index(before).reshape([KV_BLOCK, q.shape[1]])
        acc_token = warpgroup_mma(weights, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            block, code = _block_of(p_indices, p_codes, capacity, _entry(i_tile, start, count, tail))
            lo, hi, code = _band_of(p_bands, num_masks, code)
            scores = _hide(scores, rows, columns, p_bits, code, lo, hi, seqlen_k - block * KV_BLOCK, Q_BLOCK, KV_BLOCK)
        exact, row_max, row_sum, rescale = _softmax_step(scores, row_max, row_sum, scale_log2, MASKED)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        weights = gl.convert_layout(exact.to(weights.dtype), p_layout)
    return acc, row_max, row_sum, weights


@gluon.jit
def _consume(
    out_desc, q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty, p_lse,
    p_indices, p_codes, p_bits, p_bands, capacity, num_masks, start, count, partial, tail,
    i_b, i_h, row_q, q_heads, seqlen_q, seqlen_k, scale_log2,
    CONSUMER: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = out_desc.block_type.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_BLOCK, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    rows = CONSUMER * STEP_ROWS + o_row
    columns = gl.arange(0, KV_BLOCK, gl.SliceLayout(0, s_layout))
    i_h += CONSUMER * STEP_HEADS
    row_q += CONSUMER * STEP_ROWS

    block, code = _block_of(p_indices, p_codes, capacity, _entry(0, start, count, tail))
    q = q_buffers.index(CONSUMER).reshape([ROWS, D])
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    zero = gl.zeros([ROWS, KV_BLOCK], gl.float32, s_layout)
    k = k_buffers.index(0).reshape([KV_BLOCK, D])
    s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    lo, hi, code = _band_of(p_bands, num_masks, code)
    keys = gl.where(count > 0, seqlen_k - block * KV_BLOCK, 0)
    scores = warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.arrive(k_empty.index(0), count=1)
    scores = _hide(scores, rows, columns, p_bits, code, lo, hi, keys, Q_BLOCK, KV_BLOCK)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    exact, row_max, row_sum, _ = _softmax_step(scores, row_max, row_sum, scale_log2, True)
    weights = gl.convert_layout(exact.to(out_desc.dtype), p_layout)
    acc = gl.zeros([ROWS, D], gl.float32, acc_layout)

    masked = gl.maximum(partial + tail, 1)
    tiles = gl.maximum(count, 1)
    acc, row_max, row_sum, weights = _consume_tiles(
        acc, row_max, row_sum, weights, q, k_buffers, v_buffers, k_full, k_empty, v_full, v_empty, scale_log2,
        rows, columns, p_indices, p_codes, p_bits, p_bands, capacity, num_masks, start, count, tail, seqlen_k,
        1, masked, True, Q_BLOCK, KV_BLOCK, STAGES,
    )  # fmt: skip
    acc, row_max, row_sum, weights = _consume_tiles(
        acc, row_max, row_sum, weights, q, k_buffers, v_buffers, k_full, k_empty, v_full, v_empty, scale_log2,
        rows, columns, p_indices, p_codes, p_bits, p_bands, capacity, num_masks, start, count, tail, seqlen_k,
        masked, tiles, False, Q_BLOCK, KV_BLOCK, STAGES,
    )  # fmt: skip

    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
    acc_token = warpgroup_mma(weights, v_buffers.index(last).reshape([KV_BLOCK, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    empty = row_sum == 0
    row_sum = gl.where(empty, 1.0, row_sum)
    lse = gl.where(empty, -float("inf"), (row_max + gl.log2(row_sum)) * LN2)
    p_row = p_lse + (i_b.to(gl.int64) * q_heads + i_h) * seqlen_q + row_q + o_row
    gl.store(p_row, lse, mask=row_q + o_row < seqlen_q)
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, acc_layout))[:, None]
    q.store(acc.to(out_desc.dtype))  # q is read no more: its buffer carries the result out
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [i_b, i_h, row_q, 0], q_buffers.index(CONSUMER))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity", "num_masks", "seqlen_q", "seqlen_k", "batch", "q_heads", "group_size"])
def _sparse_attention_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, p_lse, p_order,
    p_indptr, p_num_partial, p_indices, p_codes, p_bits, p_bands,
    capacity, num_masks, layout_stride_b, layout_stride_h,
    seqlen_q, seqlen_k, batch, q_heads, group_size, scale_log2,
    CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = (CONSUMERS - 1) * STEP_HEADS + 1  # heads of one program
    i_program = gl.program_id(0)
    units = q_heads // HEADS
    i_h = i_program % units * HEADS
    i_b = i_program // units % batch
    q_blocks = (seqlen_q + Q_BLOCK - 1) // Q_BLOCK
    lead = (i_b * layout_stride_b + i_h * layout_stride_h).to(gl.int64)
    i_row = q_blocks - 1 - i_program // (units * batch)  # the longest rows first, under a causal mask
    if ORDERED:
        i_row = gl.load(p_order + lead * q_blocks + i_program // (units * batch))
        i_row = gl.minimum(gl.maximum(i_row, 0), q_blocks - 1)
    i_hk = i_h // group_size
    row_q = i_row * Q_BLOCK

    start = gl.minimum(gl.maximum(gl.load(p_indptr + lead * (q_blocks + 1) + i_row), 0), capacity)
    stop = gl.load(p_indptr + lead * (q_blocks + 1) + i_row + 1)
    count = gl.minimum(gl.maximum(stop, start), capacity) - start
    partial = gl.minimum(gl.maximum(gl.load(p_num_partial + lead * q_blocks + i_row), 0), count)
    tail = gl.where((count > partial) & (seqlen_k % KV_BLOCK != 0), 1, 0)

    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[3]
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KV_BLOCK, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KV_BLOCK, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (
                out_desc, q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty, p_lse,
                p_indices, p_codes, p_bits, p_bands, capacity, num_masks, start, count, partial, tail,
                i_b, i_h, row_q, q_heads, seqlen_q, seqlen_k, scale_log2,
                0, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STAGES,
            )),
            (_consume, (
                out_desc, q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty, p_lse,
                p_indices, p_codes, p_bits, p_bands, capacity, num_masks, start, count, partial, tail,
                i_b, i_h, row_q, q_heads, seqlen_q, seqlen_k, scale_log2,
                1, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STAGES,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty,
                p_indices, capacity, start, count, tail, i_b, i_h, i_hk, row_q,
                CONSUMERS, STEP_ROWS, STEP_HEADS, KV_BLOCK, STAGES,
            )),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                out_desc, q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty, p_lse,
                p_indices, p_codes, p_bits, p_bands, capacity, num_masks, start, count, partial, tail,
                i_b, i_h, row_q, q_heads, seqlen_q, seqlen_k, scale_log2,
                0, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STAGES,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_buffers, k_buffers, v_buffers, q_full, k_full, k_empty, v_full, v_empty,
                p_indices, capacity, start, count, tail, i_b, i_h, i_hk, row_q,
                CONSUMERS, STEP_ROWS, STEP_HEADS, KV_BLOCK, STAGES,
            )),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def attention_forward(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.attention_forward`."""
    batch, seqlen_q, q_heads = q.shape[:3]
    seqlen_k, kv_heads = k.shape[1:3]
    out = q.new_empty(q.shape)
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if seqlen_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    q, scale = positive_scale(q, scale)
    q_block, kv_block = layout.block_size
    pair_heads = q_block == 64 and layout.layout_heads == 1 and (q_heads // kv_heads) % 2 == 0
    consumers = 2 if q_block == 128 or pair_heads else 1
    grid = layout.q_blocks * batch * q_heads // (2 if pair_heads else 1)
    order, ordered = order_argument(layout)
    _sparse_attention_hopper_fwd_kernel[(grid,)](
        gluon_rows(q, 64),
        gluon_rows(k, kv_block),
        gluon_rows(v, kv_block),
        gluon_rows(out, 64),
        lse,
        order,
        layout.kv_indptr.contiguous(),
        layout.kv_num_partial.contiguous(),
        layout.kv_indices.contiguous(),
        layout.kv_masks.contiguous(),
        *mask_arguments(layout, layout.kv_indices.numel()),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        q_heads=q_heads,
        group_size=q_heads // kv_heads,
        scale_log2=scale * LOG2E,
        CONSUMERS=consumers,
        STEP_ROWS=64 if q_block == 128 else 0,
        STEP_HEADS=1 if pair_heads else 0,
        Q_BLOCK=q_block,
        KV_BLOCK=kv_block,
        STAGES=2,
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        ORDERED=ordered,
        num_warps=4,
        maxnreg=168 if consumers == 2 else 128,
    )
    return out, lse


def gluon_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """`rows` rows of one head of (B, N, H, D) at a time."""
    view = tma_view(x)
    block = [1, 1, rows, view.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), block, layout)
