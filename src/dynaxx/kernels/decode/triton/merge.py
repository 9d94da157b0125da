# SPDX-License-Identifier: Apache-2.0
"""Merging of the parts of decode/forward.py, list by list. Shapes and part numbers are defined there."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from dynaxx.kernels.primitives.numbers import LOG2E
from dynaxx.kernels.runtime.launcher import kernel_launcher


@triton.jit
def list_bounds(p_counts, lists, BLOCK_L: tl.constexpr):
    """Return the counts of all lists, where each list ends in the row of all pages, and the length of the row."""
    o_l = tl.arange(0, BLOCK_L)
    counts = tl.load(p_counts + o_l, mask=o_l < lists, other=0)
    return counts, tl.cumsum(counts, 0), tl.sum(counts, 0)


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen_q", "group_size", "kv_heads", "lists", "num_programs"])
def _decode_merge_kernel(
    p_acc,
    p_state,
    p_counts,
    p_out,  # (B, N, Hq, E) contiguous
    p_lse,  # (B, Hq, N) contiguous, fp32
    p_sink_logits,  # (Hq,)
    seqlen_q,
    group_size,
    kv_heads,
    lists,
    num_programs,
    scale,
    EXACT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the softmax over all keys of a list from its parts; zeros if there is no part."""
    i_list, i_row = tl.program_id(0), tl.program_id(1)
    rows = seqlen_q * group_size
    counts, ends, total = list_bounds(p_counts, lists, BLOCK_L)
    o_l, o_g, o_e = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    count = tl.sum(tl.where(o_l == i_list, counts, 0), 0)
    stop = tl.sum(tl.where(o_l == i_list, ends, 0), 0).to(tl.int64)
    wide = tl.maximum(total, 1).to(tl.int64)
    pieces = tl.minimum(num_programs, wide)
    first = ((stop - count + 1) * pieces - 1) // wide  # the program whose piece contains the list's first page
    last = (stop * pieces - 1) // wide
    acc = tl.zeros([BLOCK_E], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total_weight = tl.full([], 0.0, tl.float32)
    if PDL:  # counts were complete before this kernel was launched, because the previous kernel waited for them
        gdc_wait()
    if EXACT:
        exact = (num_programs + lists + i_list).to(tl.int64) * rows + i_row
        acc += tl.load(p_acc + exact * E + o_e, mask=o_e < E, other=0.0)
        top = tl.maximum(top, tl.load(p_state + exact * 2))
        total_weight += tl.load(p_state + exact * 2 + 1)
    if count > 0:
        for start in range(first, last + 1, BLOCK_G):
            part = (start + o_g + i_list) * rows + i_row
            known = start + o_g <= last
            largest = tl.load(p_state + part * 2, mask=known, other=float("-inf"))
            sums = tl.load(p_state + part * 2 + 1, mask=known, other=0.0)
            mask = known[:, None] & (o_e < E)[None, :]
            found = tl.load(p_acc + part[:, None] * E + o_e[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(largest, 0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2((top - shift) * (scale * LOG2E))
            weights = tl.exp2((largest - shift) * (scale * LOG2E))
            acc = acc * rescale + tl.sum(found * weights[:, None], 0)
            total_weight = total_weight * rescale + tl.sum(sums * weights, 0)
            top = new_top
    empty = total_weight == 0
    i_b, i_n = i_list // kv_heads, i_row // group_size
    i_head = (i_list % kv_heads) * group_size + i_row % group_size
    q_heads = kv_heads * group_size
    top *= scale
    if HAS_SINKS:
        sink = tl.load(p_sink_logits + i_head).to(tl.float32)
        with_sink = tl.maximum(top, sink)
        shift = tl.where(with_sink == float("-inf"), 0.0, with_sink)
        rescale = tl.exp(top - shift)
        acc, total_weight = acc * rescale, total_weight * rescale + tl.exp(sink - shift)
        top, empty = with_sink, with_sink == float("-inf")
    total_weight = tl.where(empty, 1.0, total_weight)
    p_out += ((i_b * seqlen_q + i_n).to(tl.int64) * q_heads + i_head) * E
    tl.store(p_out + o_e, (acc / total_weight).to(p_out.dtype.element_ty), mask=o_e < E)
    lse = tl.where(empty, float("-inf"), top + tl.log(total_weight))
    tl.store(p_lse + (i_b * q_heads + i_head).to(tl.int64) * seqlen_q + i_n, lse)
