# SPDX-License-Identifier: Apache-2.0
"""dk and dv of selected attention for Hopper, in Gluon: one producer warp, one consumer warpgroup of 64 keys.

    producer warp   gathers rows of q and do of the entries: one TMA copy per entry's group and 64 columns
    consumer        as in `backward_dkv`: scores.T -> weights -> dv; ds -> dk

A program holds one block of keys and processes some of the entries that selected it. Names and index are those of
`kernels.nsa.gpu.gather`.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.compat import reinterpret, tma_load
from dynaxx.kernels.primitives.hopper.descriptors import LOG2E, dense_rows
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.key_items import Items
from dynaxx.trained.nsa.kernels.hopper.selected_tiles import descriptor
from dynaxx.trained.nsa.spans import NsaSpans

LOG2E_ = gl.constexpr(LOG2E)
PANEL = gl.constexpr(64)  # columns per panel: 128 bytes, the span of a swizzle


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty,
    p_entries, begin, end, start, i_head, i_hk, per_query,
    PANELS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ENTRIES: gl.constexpr = ROWS // GROUP
    mbarrier.expect(kv_full.index(0), 2 * PANELS * k_desc.block_type.nbytes)
    for i_panel in gl.static_range(PANELS):
        at = [i_hk, start, i_panel * PANEL]
        tma_load(k_desc, at, kv_full.index(0), k_buffers.index(i_panel))
        tma_load(v_desc, at, kv_full.index(0), v_buffers.index(i_panel))
    tiles = (end - begin + ENTRIES - 1) // ENTRIES
    for i_tile in range(tiles):
        stage = i_tile % STAGES
        mbarrier.wait(empty.index(stage), ((i_tile // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * PANELS * ENTRIES * q_desc.block_type.nbytes)
        for i_entry in gl.static_range(ENTRIES):
            t = gl.load(p_entries + gl.minimum(begin + i_tile * ENTRIES + i_entry, end - 1)) // per_query
            for i_panel in gl.static_range(PANELS):
                at = [t, i_head * GROUP, i_panel * PANEL]
                to = (stage * PANELS + i_panel) * ENTRIES + i_entry
                tma_load(q_desc, at, full.index(stage), q_buffers.index(to))
                tma_load(do_desc, at, full.index(stage), do_buffers.index(to))


@gluon.jit
def _multiply(a, b, a_next, b_next, zero, PANELS: gl.constexpr):
    """Start a @ b.T over all panels, asynchronously."""
    token = warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    if PANELS == 2:
        token = warpgroup_mma(a_next, b_next.permute((1, 0)), token, is_async=True)
    return token


@gluon.jit
def _consume(
    p_dk, p_dv, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, p_rows, p_entries, p_last_key,
    begin, end, start, i_head, per_query, q_heads, scale,
    PANELS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ENTRIES: gl.constexpr = ROWS // GROUP
    LAST: gl.constexpr = PANELS - 1
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    panel_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = q_buffers.dtype
    q_panels = reinterpret(q_buffers, dtype, [STAGES * PANELS, ROWS, PANEL], panel_layout)
    do_panels = reinterpret(do_buffers, dtype, [STAGES * PANELS, ROWS, PANEL], panel_layout)
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    o_row = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0]))  # few loads; `columns` would need 16 per thread
    zero = gl.zeros([ROWS, PANEL], gl.float32, layout)
    dk, dk_last, dv, dv_last = zero, zero, zero, zero
    k, k_last = k_buffers.index(0).reshape([ROWS, PANEL]), k_buffers.index(LAST).reshape([ROWS, PANEL])
    v, v_last = v_buffers.index(0).reshape([ROWS, PANEL]), v_buffers.index(LAST).reshape([ROWS, PANEL])
    mbarrier.wait(kv_full.index(0), 0)
    tiles = (end - begin + ENTRIES - 1) // ENTRIES
    for i_tile in range(tiles):
        stage = i_tile % STAGES
        first = begin + i_tile * ENTRIES
        place = first + o_row // GROUP
        t = gl.load(p_entries + gl.minimum(place, end - 1)) // per_query
        p_row = p_rows + (t.to(gl.int64) * q_heads + i_head * GROUP + o_row % GROUP) * 2
        lse = gl.where(place < end, gl.load(p_row) * LOG2E_, float("inf"))
        lse = gl.convert_layout(lse, gl.SliceLayout(0, layout))
        delta_row = gl.load(p_row + 1)
        nearest = gl.load(p_last_key + gl.load(p_entries + first) // per_query)  # entries ascend by query
        q, q_last = q_panels.index(stage * PANELS), q_panels.index(stage * PANELS + LAST)
        do, do_last = do_panels.index(stage * PANELS), do_panels.index(stage * PANELS + LAST)
        mbarrier.wait(full.index(stage), (i_tile // STAGES) & 1)
        s_token = _multiply(k, q, k_last, q_last, zero, PANELS)
        dp_token = _multiply(v, do, v_last, do_last, zero, PANELS)
        scores = warpgroup_mma_wait(PANELS, deps=[s_token])
        weights = gl.exp2(scores * (scale * LOG2E_) - lse[None, :])
        if nearest < start + ROWS - 1:
            last_key = gl.convert_layout(gl.load(p_last_key + t), gl.SliceLayout(0, layout))
            weights = gl.where((start + keys)[:, None] <= last_key[None, :], weights, 0.0)
        weights = weights.to(dtype)  # halves the registers
        p = gl.convert_layout(weights, p_layout)
        dv_token = warpgroup_mma(p, do, dv, is_async=True)
        if PANELS == 2:
            dv_last_token = warpgroup_mma(p, do_last, dv_last, is_async=True)
        delta = gl.convert_layout(delta_row, gl.SliceLayout(0, layout))
        dp = warpgroup_mma_wait(PANELS, deps=[dp_token])
        ds = gl.convert_layout((weights.to(gl.float32) * (dp - delta[None, :])).to(dtype), p_layout)
        dk_token = warpgroup_mma(ds, q, dk, is_async=True)
        if PANELS == 2:
            dk_last_token = warpgroup_mma(ds, q_last, dk_last, is_async=True)
            dv, dv_last, dk, dk_last = warpgroup_mma_wait(
                0, deps=[dv_token, dv_last_token, dk_token, dk_last_token]
            )  # fmt: skip
        else:
            dv, dk = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
        mbarrier.arrive(empty.index(stage), count=1)
    D: gl.constexpr = PANELS * PANEL
    offsets = keys[:, None] * D + columns[None, :]
    gl.store(p_dk + offsets, dk * scale)
    gl.store(p_dv + offsets, dv)
    if PANELS == 2:
        gl.store(p_dk + offsets + PANEL, dk_last * scale)
        gl.store(p_dv + offsets + PANEL, dv_last)


@kernel_launcher
@gluon.jit(do_not_specialize=["blocks", "heads", "heads_per_kv", "per_query"])
def _selected_hopper_bwd_dkv_kernel(
    q_desc, do_desc, k_desc, v_desc,
    p_dk, p_dv,  # (items, 64, D) fp32
    p_rows,  # (T, Hq, 2) from `row_pairs`
    p_entries, p_cell, p_begin, p_end, p_block_start, p_last_key,
    blocks, heads, heads_per_kv,
    per_query,  # entries per query
    scale,
    PANELS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    i_item = gl.program_id(0)
    cell = gl.minimum(gl.load(p_cell + i_item), blocks * heads - 1)
    i_head = cell // blocks
    start = gl.load(p_block_start + cell % blocks)
    begin, end = gl.load(p_begin + i_item), gl.load(p_end + i_item)
    p_dk += i_item.to(gl.int64) * (ROWS * PANELS * PANEL)
    p_dv += i_item.to(gl.int64) * (ROWS * PANELS * PANEL)
    dtype: gl.constexpr = q_desc.dtype
    COPIES: gl.constexpr = STAGES * PANELS * (ROWS // GROUP)
    q_buffers = gl.allocate_shared_memory(dtype, [COPIES, 1, GROUP, PANEL], q_desc.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [COPIES, 1, GROUP, PANEL], do_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [PANELS, 1, ROWS, PANEL], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [PANELS, 1, ROWS, PANEL], v_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize([
        (_consume, (
            p_dk, p_dv, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, p_rows, p_entries,
            p_last_key, begin, end, start, i_head, per_query, heads * GROUP, scale, PANELS, GROUP, STAGES,
        )),
        (_produce, (
            q_desc, do_desc, k_desc, v_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty,
            p_entries, begin, end, start, i_head, i_head // heads_per_kv, per_query, PANELS, GROUP, STAGES,
        )),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def items_dkv(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, index: Items, slots: int, spans: NsaSpans,
    items: tuple[Tensor, Tensor], scale: float,
) -> None:  # fmt: skip
    """Write the contributions of each item of a single chunk to dk and dv, fp32 (items, 64, D)."""
    do, q, k, v = (dense_rows(x[None])[0] for x in (do, q, k, v))
    dim, heads = q.shape[2], (index.first_item.shape[1] - 1) // len(spans.block_start)
    group_size = q.shape[1] // heads
    _selected_hopper_bwd_dkv_kernel[(index.cell.shape[1],)](
        descriptor(q, (1, group_size, 64)),
        descriptor(do, (1, group_size, 64)),
        descriptor(k.transpose(0, 1), (1, 64, 64)),
        descriptor(v.transpose(0, 1), (1, 64, 64)),
        *items,
        rows,
        index.entries,
        index.cell,
        index.begin,
        index.end,
        spans.block_start,
        spans.last_key,
        blocks=len(spans.block_start),
        heads=heads,
        heads_per_kv=heads // k.shape[1],
        per_query=heads * slots,
        scale=scale,
        PANELS=dim // 64,
        GROUP=group_size,
        STAGES=2,
        PRODUCER_REGISTERS=24,
        num_warps=4,
        maxnreg=128,
    )
