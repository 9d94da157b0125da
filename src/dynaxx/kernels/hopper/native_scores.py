# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Scores of selection blocks for Hopper, in Gluon: one producer warp and a few consumers.

A program holds 64 queries of one selection head and some compressed tokens, 128 of each consumer. The producer brings
the rows of one q head of the group after the other; a consumer sums the weights exp(q @ k_cmp - lse) of its tokens in
registers, then pools tokens to blocks. Consumers multiply in turn, or all would multiply at once and then all take
exponentials at once. Names and results as in `kernels.triton.native_select`.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dynaxx.kernels.hopper.forward_consume import ROWS
from dynaxx.kernels.hopper.launch import LOG2E, dense_rows
from dynaxx.kernels.hopper.selected_tiles import descriptor, registers
from dynaxx.kernels.triton.light import light_launch
from dynaxx.kernels.triton.native_select import Scores
from dynaxx.kernels.triton.native_top import strides_per
from dynaxx.layout.native import NativeSpans

LOG2E_ = gl.constexpr(LOG2E)
CONSUMERS = gl.constexpr(3)
TOKENS = gl.constexpr(128)  # of one consumer
STAGES = gl.constexpr(4)  # q heads in flight
TILE_ROWS = 64  # queries of a program


@gluon.jit
def _produce(
    q_desc, k_desc, q_buffers, k_buffers, k_full, full, empty, first_t, first_token, i_head, i_hk, group_size,
):  # fmt: skip
    mbarrier.expect(k_full.index(0), CONSUMERS * k_desc.block_type.nbytes)
    for u in gl.static_range(CONSUMERS):
        at = [i_hk, first_token + u * TOKENS, 0]
        tma.async_copy_global_to_shared(k_desc, at, k_full.index(0), k_buffers.index(u))
    for member in range(group_size):
        stage = member % STAGES
        mbarrier.wait(empty.index(stage), ((member // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), q_desc.block_type.nbytes)
        at = [first_t, i_head * group_size + member, 0]
        tma.async_copy_global_to_shared(q_desc, at, full.index(stage), q_buffers.index(stage))


@gluon.jit
def _store_rows(p_rows, values, first_row, end_row, first_block, blocks, row_stride):
    """[64, blocks of a consumer] to rows of fp32 scores, those that exist."""
    BLOCKS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    block = first_block + gl.arange(0, BLOCKS, gl.SliceLayout(0, layout))
    mask = (row < end_row)[:, None] & (block < blocks)[None, :]
    offsets = row.to(gl.int64)[:, None] * row_stride + block[None, :]
    gl.store(p_rows + offsets, gl.convert_layout(values, layout), mask=mask)


@gluon.jit
def _consume(
    tokens, CONSUMER: gl.constexpr, GROUP: gl.constexpr, PER_TOKEN: gl.constexpr, PER_BLOCK: gl.constexpr,
    MAX: gl.constexpr,
):  # fmt: skip
    (
        q_buffers, k_buffers, k_full, full, empty, turns, p_lse, p_own, p_next, p_num_cmp, first_t, end_t, first_row,
        first_token, most, i_head, heads, blocks, queries, scale_log2,
    ) = tokens  # fmt: skip
    D: gl.constexpr = q_buffers.shape[3]
    BLOCKS: gl.constexpr = TOKENS // PER_BLOCK
    FIRST: gl.constexpr = 1 if CONSUMER == 0 else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    t = first_t + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside = t < end_t
    first_token += CONSUMER * TOKENS
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    seen = gl.load(p_num_cmp + t, mask=inside, other=0)
    p_lse += (i_head * GROUP).to(gl.int64) * queries
    total = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    k = k_buffers.index(CONSUMER).reshape([TOKENS, D])
    mbarrier.wait(k_full.index(0), 0)
    zero = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    for member in range(GROUP):
        lse = gl.load(p_lse + member * queries.to(gl.int64) + t, mask=inside, other=float("inf"))
        stage = member % STAGES
        mbarrier.wait(full.index(stage), (member // STAGES) & 1)
        mbarrier.wait(turns.index(CONSUMER), (member + FIRST) & 1)
        if first_token < most:
            q = q_buffers.index(stage).reshape([ROWS, D])
            s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[s_token])
            mbarrier.arrive(turns.index((CONSUMER + 1) % CONSUMERS), count=1)
            mbarrier.arrive(empty.index(stage), count=1)
            total += gl.exp2(scores * scale_log2 - (lse * LOG2E_)[:, None])
        else:  # tokens behind all that these queries see
            mbarrier.arrive(turns.index((CONSUMER + 1) % CONSUMERS), count=1)
            mbarrier.arrive(empty.index(stage), count=1)
    total = gl.where(token[None, :] < seen[:, None], total, 0.0)
    by_block = gl.reshape(total, [ROWS, BLOCKS, PER_BLOCK])
    places: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, by_block.type.layout))
    shared = gl.minimum(PER_BLOCK - gl.arange(0, PER_BLOCK, places), PER_TOKEN)[None, None, :]
    own = gl.max(by_block, 2) if MAX else gl.sum(by_block * shared, 2)
    row, first_block = first_t - first_row, first_token // PER_BLOCK
    p_own += i_head * blocks
    _store_rows(p_own, own, row, end_t - first_row, first_block, blocks, heads * blocks)
    if PER_TOKEN > 1:
        over = PER_TOKEN - shared  # strides behind the block; without any, nothing: weights are not negative
        behind = gl.max(gl.where(over > 0, by_block, 0.0), 2) if MAX else gl.sum(by_block * over, 2)
        p_next += i_head * blocks
        _store_rows(p_next, behind, row, end_t - first_row, first_block + 1, blocks, heads * blocks)


@light_launch
@gluon.jit(do_not_specialize=["first_row", "queries", "heads_per_kv", "blocks"])
def _score_hopper_kernel(
    q_desc, k_desc, p_lse, p_own, p_next, p_tile_first, p_tile_end, p_first_cmp, p_num_cmp,
    first_row, queries, heads_per_kv, blocks, scale_log2,
    GROUP: gl.constexpr, PER_TOKEN: gl.constexpr, PER_BLOCK: gl.constexpr, MAX: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    heads = gl.num_programs(0)
    i_head, i_tile = gl.program_id(0), gl.program_id(2)
    first_t, end_t = gl.load(p_tile_first + i_tile), gl.load(p_tile_end + i_tile)
    most = gl.load(p_num_cmp + end_t - 1)  # the last query of a sequence sees most
    first_token = gl.program_id(1) * (CONSUMERS * TOKENS)
    if first_token < most:
        first_key = gl.load(p_first_cmp + first_t) + first_token
        dtype: gl.constexpr = q_desc.dtype
        D: gl.constexpr = q_desc.block_type.shape[2]
        q_buffers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, 1, D], q_desc.layout)
        k_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, TOKENS, D], k_desc.layout)
        k_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        mbarrier.init(k_full.index(0), count=1)
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(turns.index(i), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        tokens = (
            q_buffers, k_buffers, k_full, full, empty, turns, p_lse, p_own, p_next, p_num_cmp, first_t, end_t,
            first_row, first_token, most, i_head, heads, blocks, queries, scale_log2,
        )  # fmt: skip
        gl.warp_specialize([
            (_consume, (tokens, 0, GROUP, PER_TOKEN, PER_BLOCK, MAX)),
            (_consume, (tokens, 1, GROUP, PER_TOKEN, PER_BLOCK, MAX)),
            (_consume, (tokens, 2, GROUP, PER_TOKEN, PER_BLOCK, MAX)),
            (_produce, (
                q_desc, k_desc, q_buffers, k_buffers, k_full, full, empty, first_t, first_key, i_head,
                i_head // heads_per_kv, GROUP,
            )),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def score_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NativeSpans, scores: Scores, scale: float
) -> None:
    """A `native_select.Scorer` for tiles of 64 rows; lse is not None."""
    assert lse is not None, "raw scores are Triton's"
    q, k_cmp = (dense_rows(x[None])[0] for x in (q, k_cmp))
    heads, blocks = scores.own.shape[1:]
    per_token, per_block = strides_per(spans.sizes)
    group_size, dim = q.shape[1] // heads, q.shape[2]
    parts = -(-blocks * per_block // (CONSUMERS.value * TOKENS.value))
    _score_hopper_kernel[(heads, parts, scores.some.stop - scores.some.start)](
        descriptor(q, (64, 1, dim)),
        descriptor(k_cmp.transpose(0, 1), (1, TOKENS.value, dim)),
        lse.contiguous(),
        scores.own,
        scores.behind,
        scores.tiles.first[scores.some],
        scores.tiles.end[scores.some],
        spans.first_cmp,
        spans.num_cmp,
        first_row=scores.first_row,
        queries=q.shape[0],
        heads_per_kv=heads // k_cmp.shape[1],
        blocks=blocks,
        scale_log2=scale * LOG2E,
        GROUP=group_size,
        PER_TOKEN=per_token,
        PER_BLOCK=per_block,
        MAX=spans.sizes.pool == "max",
        **registers(CONSUMERS.value),
    )
