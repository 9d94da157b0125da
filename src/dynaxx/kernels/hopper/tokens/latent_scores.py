# SPDX-License-Identifier: Apache-2.0
"""First step of the backward over chosen tokens of latent attention: weights p and their gradients ds, to memory.

A program is one query and 64 of its q heads, one warpgroup. q and do stay; keys, whose first part are the values, pass
by in two buffers of 32, as in `latent.py`:

    wait for the keys of tile i -> s = q k, dp = do v begin -> gather of tile i + 1 begins -> p, ds of tile i, stored
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher
from dynaxx.kernels.hopper.tokens.latent import REST, ROWS, TILE, WIDE

KEYS = gl.constexpr(32)  # of a tile
WARPS = 4
LOG2E = gl.constexpr(1.4426950408889634)
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
REST_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


@gluon.jit
def _listed(p_list, i_tile, slots, layout: gl.constexpr):
    """Return the tokens of tile `i_tile` of a list, -1 for none, [KEYS]."""
    place = i_tile * KEYS + gl.arange(0, KEYS, layout)
    return gl.load(p_list + place, mask=place < slots, other=-1)


@gluon.jit
def _gather(k_wide, k_rest, p_k, key_wide, key_rest, last, stride_kn):
    """Begin to copy the rows of keys to a buffer; rows of tokens that are not there become zero."""
    o_wide = gl.arange(0, WIDE, gl.SliceLayout(0, WIDE_ROWS))
    o_rest = WIDE + gl.arange(0, REST, gl.SliceLayout(0, REST_ROWS))
    there_wide, there_rest = (key_wide >= 0) & (key_wide <= last), (key_rest >= 0) & (key_rest <= last)
    row_wide, row_rest = gl.where(there_wide, key_wide, 0), gl.where(there_rest, key_rest, 0)
    p_wide = p_k + (row_wide.to(gl.int64) * stride_kn)[:, None] + o_wide[None, :]
    p_rest = p_k + (row_rest.to(gl.int64) * stride_kn)[:, None] + o_rest[None, :]
    async_copy.async_copy_global_to_shared(k_wide, p_wide, mask=there_wide[:, None])
    async_copy.async_copy_global_to_shared(k_rest, p_rest, mask=there_rest[:, None])


@gluon.jit
def _rows(tile, p_x, t, i_part, group_size, stride_n, stride_h, FIRST: gl.constexpr, layout: gl.constexpr):
    """Copy columns of a query's q heads to shared memory, from column FIRST on."""
    COLUMNS: gl.constexpr = tile.shape[1]
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    p_rows = p_x + t * stride_n + head.to(gl.int64)[:, None] * stride_h + column[None, :]
    tile.store(gl.load(p_rows, mask=(head < group_size)[:, None], other=0.0))


@kernel_launcher
@gluon.jit(do_not_specialize=["queries", "slots", "group_size", "parts", "first_query"])
def _token_latent_scores_kernel(
    p_q,
    p_k,
    p_do,  # (T, Hq, 512)
    p_weights,  # (queries of the launch, parts * ROWS, slots) in q's dtype
    p_ds,  # the same
    p_lse,  # (Hq, T) fp32 contiguous
    p_delta,  # the same
    p_chosen,  # (T, 1, n) int32 contiguous
    p_position,  # (T,) int32
    p_first_key,  # (T,) int32
    queries,
    slots,
    group_size,  # q heads
    parts,  # programs of a query
    first_query,  # of the launch
    scale,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_don,
    stride_doh,
):
    i_program = gl.program_id(0)
    i_query, i_part = i_program // parts, i_program % parts
    t = (first_query + i_query).to(gl.int64)
    p_list = p_chosen + t * slots
    last = gl.load(p_position + t)
    p_k += gl.load(p_first_key + t).to(gl.int64) * stride_kn
    dtype: gl.constexpr = p_q.dtype.element_ty

    q_wide = gl.allocate_shared_memory(dtype, [ROWS, WIDE], TILE)
    q_rest = gl.allocate_shared_memory(dtype, [ROWS, REST], TILE)
    do = gl.allocate_shared_memory(dtype, [ROWS, WIDE], TILE)
    k_wide = gl.allocate_shared_memory(dtype, [2, KEYS, WIDE], TILE)
    k_rest = gl.allocate_shared_memory(dtype, [2, KEYS, REST], TILE)
    wide_keys: gl.constexpr = gl.SliceLayout(1, WIDE_ROWS)
    rest_keys: gl.constexpr = gl.SliceLayout(1, REST_ROWS)
    score_keys: gl.constexpr = gl.SliceLayout(0, SCORES)

    tiles = gl.cdiv(slots, KEYS)
    first_wide, first_rest = _listed(p_list, 0, slots, wide_keys), _listed(p_list, 0, slots, rest_keys)
    _gather(k_wide.index(0), k_rest.index(0), p_k, first_wide, first_rest, last, stride_kn)
    async_copy.commit_group()
    next_wide, next_rest = _listed(p_list, 1, slots, wide_keys), _listed(p_list, 1, slots, rest_keys)
    key = _listed(p_list, 0, slots, score_keys)
    _rows(q_wide, p_q, t, i_part, group_size, stride_qn, stride_qh, 0, WIDE_ROWS)
    _rows(q_rest, p_q, t, i_part, group_size, stride_qn, stride_qh, WIDE, REST_ROWS)
    _rows(do, p_do, t, i_part, group_size, stride_don, stride_doh, 0, WIDE_ROWS)

    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    head = i_part * ROWS + o_row
    inside = head < group_size
    lse = gl.load(p_lse + head.to(gl.int64) * queries + t, mask=inside, other=0.0)
    lse = gl.where(lse == -float("inf"), 0.0, lse) * LOG2E
    delta = gl.load(p_delta + head.to(gl.int64) * queries + t, mask=inside, other=0.0)
    to_row = (i_program.to(gl.int64) * ROWS + o_row)[:, None] * slots
    for i_tile in range(tiles):
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        own_wide, own_rest = k_wide.index(i_tile % 2), k_rest.index(i_tile % 2)
        zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        token = warpgroup_mma(q_wide, own_wide.permute((1, 0)), zero, use_acc=False, is_async=True)
        token = warpgroup_mma(q_rest, own_rest.permute((1, 0)), token, is_async=True)
        dp_token = warpgroup_mma(do, own_wide.permute((1, 0)), zero, use_acc=False, is_async=True)
        if i_tile + 1 < tiles:
            other = (i_tile + 1) % 2
            _gather(k_wide.index(other), k_rest.index(other), p_k, next_wide, next_rest, last, stride_kn)
        async_copy.commit_group()
        next_wide = _listed(p_list, i_tile + 2, slots, wide_keys)
        next_rest = _listed(p_list, i_tile + 2, slots, rest_keys)
        visible = ((key >= 0) & (key <= last))[None, :] & inside[:, None]
        key = _listed(p_list, i_tile + 1, slots, score_keys)
        scores, dp = warpgroup_mma_wait(0, deps=[token, dp_token])
        weights = gl.where(visible, gl.exp2(scores * (scale * LOG2E) - lse[:, None]), 0.0)
        ds = weights * (dp - delta[:, None]) * scale
        place = i_tile * KEYS + gl.arange(0, KEYS, score_keys)
        gl.store(p_weights + to_row + place[None, :], weights.to(dtype), mask=(place < slots)[None, :])
        gl.store(p_ds + to_row + place[None, :], ds.to(dtype), mask=(place < slots)[None, :])
    async_copy.wait_group(0)
