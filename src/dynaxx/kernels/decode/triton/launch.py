# SPDX-License-Identifier: Apache-2.0
"""Decoding in Triton: select pages, and attend to selected or given pages; `kernels.decode.contract.DecodeKernels`.

select_and_attend   scores of pages -> selection (in this or in the attention kernel) -> attention -> merge
attend_pages        given pages -> readable pages first, counts -> attention -> merge
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dynaxx.kernels.decode.triton import config
from dynaxx.kernels.decode.triton.forward import _decode_fwd_kernel
from dynaxx.kernels.decode.triton.merge import _decode_merge_kernel
from dynaxx.kernels.decode.triton.pages import (
    PageTable,
    cache_arguments,
    exact_slots,
    first_visible,
    physical_pages,
    table_arguments,
)
from dynaxx.kernels.decode.triton.pages import summarize_pages as _summarize_pages
from dynaxx.kernels.decode.triton.select_pages import PageChoice, score_all_pages
from dynaxx.kernels.decode.triton.select_pages import select_pages as _select_pages
from dynaxx.kernels.device import gpu_of, padded
from dynaxx.kernels.runtime.arguments import positive_scale, strides_of, unit_stride
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout.paging import PagedCache, PageSummaries


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen_q", "left"])
def _count_pages_kernel(
    p_pages,  # (B, Hk, S) int32, as given
    p_listed,  # (B, Hk, S) int32, receives the readable pages first
    p_counts,  # (B, Hk) int32
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    kv_heads,
    max_pages,
    slots,
    seqlen_q,
    left,  # keys that a query sees before its own, if WINDOW
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    ALL: tl.constexpr,  # every page that a sequence's queries see, without lists
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i_list = tl.program_id(0)
    i_b = i_list // kv_heads
    seqused = tl.load(p_seqused + i_b)
    first_page = first_visible(p_leftpad, i_b, seqused, seqlen_q, left, HAS_LEFTPAD, WINDOW) // PAGE
    stop_page = tl.minimum(tl.cdiv(seqused, PAGE), max_pages)
    count = tl.maximum(stop_page - first_page, 0)
    if ALL == 0:
        o_s = tl.arange(0, BLOCK_S)
        at = i_list.to(tl.int64) * slots
        page = tl.load(p_pages + at + o_s, mask=o_s < slots, other=-1)
        known = (page >= first_page) & (page < stop_page)
        there = physical_pages(PageTable(p_table, table_stride, num_physical), i_b, page, known, PAGED) >= 0
        tl.store(p_listed + at + tl.cumsum(there.to(tl.int32), 0) - 1, page, mask=there)
        count = tl.sum(there.to(tl.int32), 0)
    tl.store(p_counts + i_list, count)


def select_and_attend(
    q: Tensor,
    cache: PagedCache,
    wanted: Tensor,
    sinks: int,
    window: int,
    slots: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse over selected pages, like `kernels.decode.reference`."""
    return record_or_replay(_choose_and_attend, cache, (q, wanted, sink_logits), softcap, sinks, window, slots, scale)


def _choose_and_attend(cache, q, wanted, sink_logits, softcap, *settings):
    listed, counts, choice = score_all_pages(q, cache, wanted, *settings)
    return _attend(cache, q, listed, counts, sink_logits, settings[-1], softcap, None, choice)


def select_pages(
    q: Tensor, cache: PagedCache, wanted: Tensor, sinks: int, window: int, slots: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the selected pages, like `kernels.decode.reference`."""
    return record_or_replay(_select_pages, cache, (q, wanted), sinks, window, slots, scale)


def summarize_pages(cache: PagedCache, summaries: PageSummaries, new_tokens: int | None) -> None:
    """Write summaries, like `kernels.decode.reference`."""
    assert summaries is cache.summaries
    record_or_replay(_summarize, cache, (None,), new_tokens)


def summarize_layers(cache: PagedCache, offsets: Tensor, new_tokens: int) -> None:
    """Write the summaries of several layers in one launch.

    Args:
        cache: the sequences in the first layer.
        offsets: the result of `layer_offsets`.
        new_tokens: as for `summarize_pages`.
    """
    record_or_replay(_summarize, cache, (offsets,), min(new_tokens, cache.max_keys))


def _summarize(cache, offsets, new_tokens):
    _summarize_pages(cache, cache.summaries, new_tokens, offsets)
    return ()


def attend_pages(
    q: Tensor,
    cache: PagedCache,
    block_indices: Tensor | None,
    counts: Tensor | None,
    scale: float,
    softcap: float | None = None,
    left: int | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, like `kernels.decode.reference`; 8-bit keys are multiplied in q's dtype, fp32 in fp32."""
    return record_or_replay(_attend, cache, (q, block_indices, counts, sink_logits), scale, softcap, left)


def _attend(
    cache: PagedCache,
    q: Tensor,
    block_indices: Tensor | None,
    counts: Tensor | None,
    sink_logits: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    choice: PageChoice | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to pages; with a `choice`, the same kernel first selects them and lists them in block_indices."""
    batch, seqlen_q, q_heads, _ = q.shape
    out = q.new_empty(batch, seqlen_q, q_heads, cache.head_dim_v)
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q = q if cache.k.dtype.itemsize == 1 else q.to(torch.promote_types(q.dtype, cache.k.dtype))
    q, scale = positive_scale(unit_stride(q), scale)
    group_size = q_heads // cache.kv_heads
    rows, lists = seqlen_q * group_size, batch * cache.kv_heads
    slots = cache.max_pages if block_indices is None else block_indices.shape[2]
    if counts is None:
        block_indices, counts = _listed(cache, block_indices, seqlen_q, left)
    tiles = config.tiles_of(cache, q.dtype, choice is not None)
    programs = config.programs_of(cache, tiles.programs, lists, lists * slots)
    parts = programs + (1 + (exact_slots(cache) > 0)) * lists
    acc = q.new_empty(parts, rows, cache.head_dim_v, dtype=torch.float32)
    state = q.new_empty(parts, rows, 2, dtype=torch.float32)
    block_m = max(8, min(config.MAX_ROWS, triton.next_power_of_2(rows)))
    loads = 1 + (block_indices is not None) + cache.is_paged  # dependent loads: page, its address, its keys
    _decode_fwd_kernel[(programs, triton.cdiv(rows, block_m))](
        q,
        cache.k,
        p_acc=acc,
        p_state=state,
        p_pages=counts if block_indices is None else block_indices,
        p_counts=counts,
        **_cache_arguments(cache, q.dtype, counts),
        **_choice_arguments(choice, cache.max_pages, counts),
        seqlen_q=seqlen_q,
        group_size=group_size,
        kv_heads=cache.kv_heads,
        lists=lists,
        slots=slots,
        max_pages=cache.max_pages,
        left=0 if left is None else left,
        scale=scale,
        cap=1.0 if softcap is None else softcap / scale,
        q_strides=strides_of(q),
        ALL=block_indices is None,
        BLOCK_M=block_m,
        BLOCK_N=tiles.keys,
        BLOCK_L=triton.next_power_of_2(lists),
        PRECISION="ieee",
        CAPPED=softcap is not None,
        WINDOW=left is not None,
        num_warps=tiles.warps,
        num_stages=config.stages(gpu_of(q.device), q.dtype, loads),
        **gpu_of(q.device).limit_registers(tiles.registers),
        **gpu_of(q.device).overlap,
    )
    _merge(acc, state, counts, out, lse, sink_logits, cache, programs, scale)
    return out, lse


def _cache_arguments(cache: PagedCache, dtype: torch.dtype, unused: Tensor) -> dict[str, Any]:
    """Return the kernel arguments that follow from a cache and a dtype of queries; `unused` is for unread pointers."""
    half = cache.k_scale is not None and dtype != torch.float32
    pairs = half and config.reads_pairs(cache)
    v = cache.v.view(torch.int16) if pairs else cache.v
    return {
        **cache_arguments(cache, unused),
        "p_v": v,
        "v_strides": cache.strides(v),
        "PAIRS": pairs,
        "HALF": half,
        "BLOCK_D": padded(cache.head_dim),
        "BLOCK_E": padded(cache.head_dim_v),
        "BLOCK_X": max(16, triton.next_power_of_2(exact_slots(cache))),
    }


def _choice_arguments(choice: PageChoice | None, max_pages: int, unused: Tensor) -> dict[str, Any]:
    """Return the kernel's arguments for the pages that it selects itself, if there is a `choice`."""
    if choice is None:
        return {"p_scores": unused, "p_wanted": unused, "sinks": 0, "window": 0, "CHOOSE": False, "BLOCK_P": 0}
    return {
        "p_scores": choice.scores,
        "p_wanted": choice.wanted,
        "sinks": choice.sinks,
        "window": choice.window,
        "CHOOSE": True,
        "BLOCK_P": max(16, triton.next_power_of_2(max_pages)),
    }


def _merge(
    acc: Tensor,
    state: Tensor,
    counts: Tensor,
    out: Tensor,
    lse: Tensor,
    sink_logits: Tensor | None,
    cache: PagedCache,
    programs: int,
    scale: float,
) -> None:
    """Write out and lse from the parts that `programs` programs computed; shapes are those of decode/forward.py."""
    _, seqlen_q, q_heads, _ = out.shape
    lists, group_size = cache.batch * cache.kv_heads, q_heads // cache.kv_heads
    _decode_merge_kernel[(lists, seqlen_q * group_size)](
        acc,
        state,
        counts,
        out,
        lse,
        lse if sink_logits is None else sink_logits.contiguous(),
        seqlen_q=seqlen_q,
        group_size=group_size,
        kv_heads=cache.kv_heads,
        lists=lists,
        num_programs=programs,
        scale=scale,
        EXACT=exact_slots(cache) > 0,
        HAS_SINKS=sink_logits is not None,
        E=cache.head_dim_v,
        BLOCK_E=padded(cache.head_dim_v),
        BLOCK_L=triton.next_power_of_2(lists),
        BLOCK_G=config.PARTS_AT_ONCE,
        num_warps=1,
        **gpu_of(out.device).overlap,
    )


def _listed(
    cache: PagedCache, block_indices: Tensor | None, seqlen_q: int, left: int | None
) -> tuple[Tensor | None, Tensor]:
    """Return the given pages with readable ones first, and how many are readable."""
    counts = torch.empty(cache.batch, cache.kv_heads, dtype=torch.int32, device=cache.device)
    given = counts if block_indices is None else block_indices.contiguous()
    slots = 0 if block_indices is None else block_indices.shape[2]
    listed = torch.empty_like(given)
    _count_pages_kernel[(cache.batch * cache.kv_heads,)](
        given,
        listed,
        counts,
        **table_arguments(cache),
        kv_heads=cache.kv_heads,
        max_pages=cache.max_pages,
        slots=slots,
        seqlen_q=seqlen_q,
        left=0 if left is None else left,
        ALL=block_indices is None,
        WINDOW=left is not None,
        PAGE=cache.page_size,
        BLOCK_S=triton.next_power_of_2(max(1, slots)),
        **gpu_of(cache.device).overlap,
    )
    return (None if block_indices is None else listed), counts
