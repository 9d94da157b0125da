# SPDX-License-Identifier: Apache-2.0
"""Split-KV attention over listed pages, in parts; `merge` combines the parts.

    all lists        [ list 0: pages ........ | list 1: pages .. | list 2: pages .... ]   one row of pages
    programs         [   0   |   1   |   2   |   3   |   4   ]                            even pieces of that row
    parts            program g's part of list i has number g + i

Each program processes an even piece of the row, even if its pages belong to several lists. One long sequence among
short ones therefore keeps all multiprocessors busy. The pieces follow from the counts of the lists, which are read on
the device. Grids depend only on tensor sizes, so a captured graph serves every length.

Legend: B batch; N queries of a step; Hq, Hk query and kv heads; D head_dim of q and k, E head_dim of v; S slots. A list
belongs to one (batch entry, kv head); its rows are the N * Hq / Hk queries of the group. A part is the result of one
program for one list. Exact tokens form one more part of every list, after all others.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dynaxx.kernels.decode.triton.choose_pages import PageRule, choose_pages, count_all_pages
from dynaxx.kernels.decode.triton.exact import ExactSizes, attend_exact
from dynaxx.kernels.decode.triton.merge import list_bounds
from dynaxx.kernels.decode.triton.pages import PageTable, first_key, first_visible, physical_pages
from dynaxx.kernels.decode.triton.rows import load_queries, load_tile, store_part, sum_of_halves
from dynaxx.kernels.primitives.numbers import LOG2E, tanh
from dynaxx.kernels.primitives.triton.conversion import unpaired, widened
from dynaxx.kernels.runtime.launcher import kernel_launcher


@kernel_launcher
@triton.jit(
    do_not_specialize=[
        "seqlen_q", "group_size", "kv_heads", "max_pages", "num_physical", "slots", "lists", "sinks", "window", "left"
    ]
)  # fmt: skip
def _decode_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_acc,  # (parts, rows, E) fp32
    p_state,  # (parts, rows, 2) fp32: largest score, sum of weights
    p_pages,  # (B, Hk, S) int32: logical pages, readable ones first
    p_counts,  # (B, Hk) int32
    p_k_scale,
    p_v_scale,
    p_exact_k,  # (B, EXACT, Hk, D) contiguous: `layout.paging.exact_tokens.ExactTokens`
    p_exact_v,
    p_scores,  # (B, Hk, P) fp32: scores of pages, if this kernel selects them
    p_wanted,  # (2, Hk) fp32
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    seqlen_q,
    group_size,
    kv_heads,
    lists,
    slots,
    max_pages,
    sinks,
    window,
    left,  # keys that a query sees before its own, if WINDOW
    scale,
    cap,  # softcap / scale, if CAPPED
    q_strides,  # `Strides`
    k_strides,  # `PageStrides`
    v_strides,
    k_scale_strides,  # `RowStrides`
    v_scale_strides,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRS: tl.constexpr,  # read v as 16-bit pairs of its values
    HALF: tl.constexpr,  # multiply 8-bit keys in fp16
    ALL: tl.constexpr,
    CHOOSE: tl.constexpr,
    EXACT: tl.constexpr,  # slots of exact tokens; 0: none
    SINKS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from every list's rows to its pages, in parts."""
    table = PageTable(p_table, table_stride, num_physical)
    rule = PageRule(p_wanted, kv_heads, max_pages, sinks, window)
    PAGES: tl.constexpr = (BLOCK_N + PAGE - 1) // PAGE  # pages per tile
    TILES: tl.constexpr = (PAGE + BLOCK_N - 1) // BLOCK_N  # tiles per page
    V_LOADED: tl.constexpr = E // 2 if PAIRS else E
    BLOCK_V: tl.constexpr = BLOCK_E // 2 if PAIRS else BLOCK_E
    FP8: tl.constexpr = p_k.dtype.element_ty == tl.float8e4nv
    exact_sizes: tl.constexpr = ExactSizes(
        EXACT, SINKS, BLOCK_X, D, E, V_LOADED, PAIRS, HALF, PRECISION, CAPPED, WINDOW
    )
    i_program, i_rows = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_programs = tl.num_programs(0)
    rows = seqlen_q * group_size
    o_m, o_n, o_d, o_e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    o_l = tl.arange(0, BLOCK_L)
    o_v = tl.arange(0, BLOCK_V)
    row = i_rows * BLOCK_M + o_m
    if (
        EXACT
    ):  # program i computes list i; needs no wait, because the previous kernel selects pages but writes no tokens
        for i_exact in tl.range(i_program, lists, num_programs, num_stages=1):
            i_b, i_h = i_exact // kv_heads, i_exact % kv_heads
            b_q, q_scale = load_queries(p_q, q_strides, i_b, i_h, row, rows, group_size, HALF, D, o_d)
            seqused = tl.load(p_seqused + i_b)
            acc, acc_odd, row_max, row_sum = attend_exact(
                p_exact_k, p_exact_v, b_q, q_scale, i_b, i_h, kv_heads, seqused - seqlen_q + row // group_size,
                first_key(p_leftpad, i_b, HAS_LEFTPAD), seqused, scale * LOG2E, cap, left, o_d, o_v, exact_sizes,
            )  # fmt: skip
            if PDL:  # until then, another kernel may still use this memory; waiting more than once is harmless
                gdc_wait()
            part = (num_programs + lists + i_exact) * rows + row
            store_part(p_acc, p_state, part, acc, acc_odd, row_max, row_sum, row < rows, o_e, E, PAIRS)
    if CHOOSE:
        counts = count_all_pages(p_seqused, p_leftpad, o_l, lists, slots, rule, HAS_LEFTPAD, PAGE)
        ends, total = tl.cumsum(counts, 0), tl.sum(counts, 0)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        counts, ends, total = list_bounds(p_counts, lists, BLOCK_L)
    pieces = tl.minimum(num_programs, tl.maximum(total, 1))  # no piece is empty
    at = (tl.minimum(i_program, pieces) * total // pieces).to(tl.int32)
    last = (tl.minimum(i_program + 1, pieces) * total // pieces).to(tl.int32)
    while at < last:
        i_list = tl.sum((ends <= at).to(tl.int32), 0)
        list_start = tl.sum(tl.where(o_l < i_list, counts, 0), 0)
        stop = tl.minimum(last, list_start + tl.sum(tl.where(o_l == i_list, counts, 0), 0))
        i_b, i_h = (i_list // kv_heads).to(tl.int64), (i_list % kv_heads).to(tl.int64)
        seqused = tl.load(p_seqused + i_b)
        leftpad = first_key(p_leftpad, i_b, HAS_LEFTPAD)
        read_from = first_visible(p_leftpad, i_b, seqused, seqlen_q, left, HAS_LEFTPAD, WINDOW)
        first_page, read_to = read_from // PAGE, seqused
        if EXACT:
            exact_sinks_stop = tl.minimum(leftpad + SINKS, seqused)
            read_from = tl.maximum(read_from, exact_sinks_stop)
            read_to = tl.maximum(exact_sinks_stop, seqused - (EXACT - SINKS))
        b_q, q_scale = load_queries(p_q, q_strides, i_b, i_h, row, rows, group_size, HALF, D, o_d)
        own_position = seqused - seqlen_q + row // group_size  # [BLOCK_M]
        p_list = p_pages + i_list.to(tl.int64) * slots
        first_slot = at - list_start
        num_slots = stop - at
        if CHOOSE:
            if PDL:
                gdc_wait()
                gdc_launch_dependents()
            p_list_scores = p_scores + i_list.to(tl.int64) * max_pages
            pages, chosen, place, found = choose_pages(
                p_list_scores, table, rule, i_b, i_h, seqused, leftpad, PAGED, PAGE, BLOCK_P
            )
            tl.store(p_list + place, pages, mask=chosen & (place >= first_slot) & (place < first_slot + num_slots))
            num_slots = tl.minimum(num_slots, found - first_slot)  # pages may be missing
            tl.debug_barrier()  # makes stores of other threads of this program visible

        acc = tl.zeros([BLOCK_V, BLOCK_M], tl.float32)
        acc_odd = acc
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        unit = 0.0
        for i_tile in range(0, tl.cdiv(num_slots, PAGES) * TILES):
            if PAGES == 1:
                slot = i_tile // TILES  # a scalar, because the tile is part of one page
                offset = (i_tile % TILES) * BLOCK_N + o_n
            else:
                slot = i_tile * PAGES + o_n // PAGE
                offset = o_n % PAGE
            listed = slot < num_slots
            page = first_page + first_slot + slot
            if ALL == 0:
                page = tl.load(p_list + first_slot + slot, mask=listed, other=-1)
            physical = physical_pages(table, i_b, page, listed & (page >= 0), PAGED)
            position = tl.where(physical >= 0, page * PAGE, read_to) + offset  # [BLOCK_N], past the end if missing
            inside = (position >= read_from) & (position < read_to)
            physical = physical.to(tl.int64)
            k_first, v_first = (
                i_b * k_strides.batch + i_h * k_strides.head,
                i_b * v_strides.batch + i_h * v_strides.head,
            )
            if PAGES == 1:  # scalars, so that everything that varies within a tile stays out of the loop
                part_start = physical * 0 + i_tile % TILES * BLOCK_N
                k_first += physical * k_strides.page + part_start * k_strides.token
                v_first += physical * v_strides.page + part_start * v_strides.token
                k_rows, v_rows = o_n.to(tl.int64) * k_strides.token, o_n.to(tl.int64) * v_strides.token
            else:
                k_rows = physical * k_strides.page + offset.to(tl.int64) * k_strides.token
                v_rows = physical * v_strides.page + offset.to(tl.int64) * v_strides.token
            p_k_tile = p_k + k_first + k_rows[:, None] + o_d[None, :]
            p_v_tile = p_v + v_first + v_rows[None, :] + o_v[:, None]
            b_k = load_tile(p_k_tile, inside[:, None], (o_d < D)[None, :], D == BLOCK_D)  # [BLOCK_N, BLOCK_D]
            b_v = load_tile(p_v_tile, inside[None, :], (o_v < V_LOADED)[:, None], V_LOADED == BLOCK_V)  # transposed
            b_k = widened(b_k, b_q.dtype, PAIRS)
            if b_k.dtype == tl.float32 and BLOCK_D >= 512:
                scores = sum_of_halves(b_k, b_q, PRECISION)
            else:
                scores = tl.dot(b_k, b_q, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            if SCALED:
                k_at = i_b * k_scale_strides.batch + physical * k_scale_strides.page + i_h * k_scale_strides.head
                v_at = i_b * v_scale_strides.batch + physical * v_scale_strides.page + i_h * v_scale_strides.head
                k_scale = tl.load(p_k_scale + k_at, mask=physical >= 0, other=0.0)  # a scalar, or [BLOCK_N]
                v_scale = tl.load(p_v_scale + v_at, mask=physical >= 0, other=0.0)
                if PAGES == 1:
                    scores = scores * (q_scale * k_scale)[None, :]
                else:
                    scores = scores * q_scale[None, :] * k_scale[:, None]
            if CAPPED:
                scores = cap * tanh(scores / cap)
            visible = inside[:, None]
            if WINDOW:
                visible &= position[:, None] >= own_position[None, :] - left
            if EXACT == 0:  # otherwise the queries' own tokens are among the exact ones
                visible &= position[:, None] <= own_position[None, :]
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 0))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = tl.exp2((row_max - shift) * (scale * LOG2E))
            weights = tl.exp2((scores - shift[None, :]) * (scale * LOG2E))
            row_sum = row_sum * rescale + tl.sum(weights, 0)
            row_max = new_max
            if SCALED:  # acc is in units of the largest scale so far, so that weights stay within fp16
                new_unit = tl.maximum(unit, v_scale if PAGES == 1 else tl.max(v_scale, 0))
                per_unit = 1.0 / tl.where(new_unit > 0, new_unit, 1.0)
                rescale *= unit * per_unit
                weights = weights * (v_scale * per_unit if PAGES == 1 else (v_scale * per_unit)[:, None])
                unit = new_unit
            weights = weights.to(b_q.dtype)
            acc *= rescale[None, :]
            if PAIRS:
                b_v, b_v_odd = unpaired(b_v, FP8)
                acc_odd = tl.dot(b_v_odd, weights, acc_odd * rescale[None, :])
            acc = tl.dot(b_v.to(b_q.dtype), weights, acc, input_precision=PRECISION)

        if SCALED:
            acc, acc_odd = acc * unit, acc_odd * unit
        part = (i_program + i_list) * rows + row
        store_part(p_acc, p_state, part, acc, acc_odd, row_max, row_sum, row < rows, o_e, E, PAIRS)
        at = stop
    if CHOOSE and PDL:  # also in programs without pages
        gdc_wait()
