# SPDX-License-Identifier: Apache-2.0
"""Selected attention by query for Hopper, in Gluon: persistent programs with one producer warp and a few consumers.

    producer warp (selected_produce)        q of a tile; then k, v of the window, and of the union of blocks, by TMA
    consumer warpgroup (selected_consume)   64 rows of 64 / group neighbouring positions -> out, lse, gated sum

Each block of the union is loaded once. A consumer skips blocks that none of its positions selected. Tiles differ in
size, so a program takes the next tile from a counter when it has loaded one.

Legend: T queries, M keys; Hq, Hk, Hs query, kv and selection heads; D head_dim of q, k and v.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.device import processors
from dynaxx.kernels.primitives.hopper.descriptors import LOG2E, dense_rows
from dynaxx.kernels.primitives.hopper.signals import NUMBERS, barriers
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.query_unions import Unions
from dynaxx.trained.nsa.kernels.gpu.selected import Mixture
from dynaxx.trained.nsa.kernels.hopper.selected_consume import consume
from dynaxx.trained.nsa.kernels.hopper.selected_produce import produce
from dynaxx.trained.nsa.kernels.hopper.selected_tiles import ANY_LOST, LOST, descriptor, registers, stages
from dynaxx.trained.nsa.spans import NsaSpans


@kernel_launcher
@gluon.jit(do_not_specialize=["queries", "heads", "heads_per_kv", "window", "tiles"])
def _selected_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc,
    cmp_desc, swa_desc,  # like out: the other branches, read if MIXED; if WINDOWED, swa is written if ALONE
    mixed_desc,  # the sum of all three branches, weighted by gates
    p_gates,  # (T, Hq, 3) contiguous: for the compressed, selected and window branch
    p_swa_lse,  # lse of the window branch, handled like swa
    p_lse, p_last_key, p_first_block, p_block_start, p_starts, p_members, p_counts,
    p_taken,  # (1,) int32, 0 if there is nothing to do; read only if CHOSEN
    p_state,  # (3 + tiles,) int32, initially 0, see `selected_tiles`
    tiles, queries, heads, heads_per_kv, window, scale_log2,
    SLOTS: gl.constexpr,  # slots in a tile's union
    CONSUMERS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    CHOSEN: gl.constexpr,
    ALONE: gl.constexpr,  # store out, and swa if it is computed here
    MIXED: gl.constexpr,  # store the sum of all branches
    WINDOWED: gl.constexpr,  # also attend to the window
    SWEEP: gl.constexpr,  # 1: only tiles whose weights left their range in a launch without maxima
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    run = True
    if SWEEP == 1:
        run = gl.load(p_state + ANY_LOST) != 0
    elif CHOSEN:
        run = gl.load(p_taken) != 0
    if run:
        POSITIONS: gl.constexpr = ROWS // GROUP  # positions per consumer
        dtype: gl.constexpr = q_desc.dtype
        CHECKED: gl.constexpr = SWEEP == 1 or dtype != gl.bfloat16
        D: gl.constexpr = q_desc.block_type.shape[2]
        q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, POSITIONS, GROUP, D], q_desc.layout)
        w_buffers = q_buffers
        if WINDOWED:
            w_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, POSITIONS, GROUP, D], q_desc.layout)
        k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, KV_BLOCK, D], k_desc.layout)
        v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, KV_BLOCK, D], v_desc.layout)
        numbers = gl.allocate_shared_memory(gl.int32, [1, 1], NUMBERS)
        q_full, q_empty = barriers(1, 1), barriers(1, CONSUMERS)
        full, empty = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
        rows = (
            out_desc, swa_desc, mixed_desc, q_buffers, w_buffers, k_buffers, v_buffers, numbers, q_full, q_empty, full,
            empty, p_lse, p_swa_lse, p_last_key, p_first_block, p_block_start, p_starts, p_members, p_counts, p_gates,
            p_state, window, queries, heads, scale_log2,
        )  # fmt: skip
        blocks = (
            q_desc, k_desc, v_desc, cmp_desc, swa_desc, q_buffers, k_buffers, v_buffers, numbers, q_full, q_empty, full,
            empty, p_last_key, p_first_block, p_block_start, p_starts, p_counts, p_state, tiles, window, queries, heads,
            heads_per_kv,
        )  # fmt: skip
        if CONSUMERS == 3:
            gl.warp_specialize([
                (consume, (rows, 0, 3, POSITIONS, GROUP, KV_BLOCK, STAGES, SLOTS, ALONE, MIXED, WINDOWED, CHECKED)),
                (consume, (rows, 1, 3, POSITIONS, GROUP, KV_BLOCK, STAGES, SLOTS, ALONE, MIXED, WINDOWED, CHECKED)),
                (consume, (rows, 2, 3, POSITIONS, GROUP, KV_BLOCK, STAGES, SLOTS, ALONE, MIXED, WINDOWED, CHECKED)),
                (produce, (blocks, 3, POSITIONS, GROUP, KV_BLOCK, STAGES, SLOTS, MIXED, WINDOWED, SWEEP)),
            ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
        else:
            gl.warp_specialize([
                (consume, (rows, 0, 2, POSITIONS, GROUP, KV_BLOCK, STAGES, SLOTS, ALONE, MIXED, WINDOWED, CHECKED)),
                (consume, (rows, 1, 2, POSITIONS, GROUP, KV_BLOCK, STAGES, SLOTS, ALONE, MIXED, WINDOWED, CHECKED)),
                (produce, (blocks, 2, POSITIONS, GROUP, KV_BLOCK, STAGES, SLOTS, MIXED, WINDOWED, SWEEP)),
            ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, union: Unions, spans: NsaSpans, consumers: int, scale: float,
    taken: Tensor | None, mixture: Mixture | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (T, Hq, D) and lse (Hq, T) fp32; scale > 0, dense rows, unions of `consumers` times 64 rows.

    Write nothing if `taken`, (1,) int32 on the device, is 0.
    """
    queries, q_heads, dim = q.shape
    tiles, heads, slots = union.starts.shape
    group_size, size = q_heads // heads, spans.sizes.slc_block
    out = q.new_empty(q.shape) if mixture is None or mixture.alone else mixture.out
    lse = q.new_empty(q_heads, queries, dtype=torch.float32)
    row_tiles = lambda x: descriptor(x, (64 // group_size, group_size, dim))
    windowed = mixture is not None and mixture.swa_lse is not None
    others, swa_lse = (out, out, out, lse), lse
    if mixture is not None:
        cmp, swa = (dense_rows(x[None])[0] for x in (mixture.cmp, mixture.swa))
        others = cmp, swa, mixture.out, mixture.gates.contiguous()
        swa_lse = lse if mixture.swa_lse is None else mixture.swa_lse
    launch = _selected_hopper_fwd_kernel[(min(tiles * heads, processors(q.device)),)]
    arguments = (
        row_tiles(q),
        descriptor(k.transpose(0, 1), (1, size, dim)),
        descriptor(v.transpose(0, 1), (1, size, dim)),
        row_tiles(out),
        *map(row_tiles, others[:3]),
        others[3],
        swa_lse,
        lse,
        spans.last_key,
        spans.first_block,
        spans.block_start,
        union.starts,
        union.members,
        union.counts,
        union.counts if taken is None else taken,
        union.counts.new_zeros(LOST.value + tiles * heads),
    )
    options = dict(
        tiles=tiles * heads,
        queries=queries,
        heads=heads,
        heads_per_kv=heads // k.shape[1],
        window=spans.sizes.window,
        scale_log2=scale * LOG2E,
        SLOTS=slots,
        CONSUMERS=consumers,
        GROUP=group_size,
        KV_BLOCK=size,
        STAGES=stages(consumers, 2 if windowed else 1, dim, size),
        CHOSEN=taken is not None,
        ALONE=mixture is None or mixture.alone,
        MIXED=mixture is not None,
        WINDOWED=windowed,
        **registers(consumers),
    )
    launch(*arguments, SWEEP=0, **options)
    if q.dtype == torch.bfloat16:  # the fp16 launch uses maxima already
        launch(*arguments, SWEEP=1, **options)
    return out, lse
