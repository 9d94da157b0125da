# SPDX-License-Identifier: Apache-2.0
"""Selection of pages: scores from summaries, and the best pages without sorting.

    many lists   one program per list: scores -> selection
    few lists, or lists of many pages
                 several programs per list: scores -> selection in the attention kernel, or in a second launch

If only pages are requested, this kernel is launched a second time to select.

Legend: B batch; N queries of a step; Hq, Hk query and kv heads; D head_dim; P logical pages; S slots. A list belongs to
one (batch entry, kv head).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dynaxx.kernels.decode.triton.choose_pages import PageRule, choose_pages, count_pages
from dynaxx.kernels.decode.triton.pages import PageTable, first_key, row_strides, table_arguments
from dynaxx.kernels.decode.triton.score_pages import ListQueries, ScoreSizes, Summaries, score_pages
from dynaxx.kernels.device import gpu_of, interpreted, padded, power_of_two, processors
from dynaxx.kernels.runtime.arguments import strides_of, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout.paging import PagedCache

TILE_BYTES = 16384  # bytes per tile of low and of high
PAGES_PER_TILE, PAGES_PER_TILE_OF_MANY = 128, 64  # 64 for many lists, so that a multiprocessor runs four programs
QUERY_ROWS = 64
TILES_AHEAD = 2
PROGRAMS_PER_PROCESSOR = 2  # if several programs score a list
MANY_LISTS = 2  # lists per multiprocessor
FEW_TILES = 8  # of a list, which one program scores and chooses from; 2,064 pages of 128 lists: 143 instead of 165 us
MANY_PAGES, MANY_SCORES = 2048, 1024  # per list, per multiprocessor: above these, the attention kernel does not select
WARPS = 4


class PageChoice(NamedTuple):
    """Arguments with which the attention kernel selects pages itself."""

    scores: Tensor  # (B * Hk, P) fp32
    wanted: Tensor  # (2, Hk) fp32
    sinks: int
    window: int  # counted from the first query


@kernel_launcher
@triton.jit(
    do_not_specialize=["seqlen_q", "group_size", "kv_heads", "max_pages", "num_physical", "sinks", "window", "slots"]
)
def _select_pages_fwd_kernel(
    p_q,
    p_low,
    p_high,
    p_scale,
    p_scores,  # (B, Hk, P) fp32
    p_wanted,  # (2, Hk) fp32
    p_chosen,  # (B, Hk, S) int32
    p_counts,  # (B, Hk) int32
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    seqlen_q,
    group_size,
    kv_heads,
    max_pages,
    sinks,
    window,  # counted from the first query
    slots,
    scale,
    q_strides,  # `Strides`
    summary_strides,  # `RowStrides`
    scale_strides,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    SCALED: tl.constexpr,
    SCORE: tl.constexpr,
    CHOOSE: tl.constexpr,
    MEAN: tl.constexpr,
    DOT: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    table = PageTable(p_table, table_stride, num_physical)
    rule = PageRule(p_wanted, kv_heads, max_pages, sinks, window)
    if PDL and SCORE:
        gdc_wait()
        gdc_launch_dependents()
    i_list = tl.program_id(0)
    i_b, i_h = i_list // kv_heads, i_list % kv_heads
    seqused = tl.load(p_seqused + i_b)
    leftpad = first_key(p_leftpad, i_b, HAS_LEFTPAD)
    first_page, stop_page = leftpad // PAGE, tl.minimum(tl.cdiv(seqused, PAGE), max_pages)
    p_scores += i_list.to(tl.int64) * max_pages
    if SCORE:
        p_row = p_q + i_b.to(tl.int64) * q_strides.b + i_h.to(tl.int64) * group_size * q_strides.h
        sizes: tl.constexpr = ScoreSizes(PAGED, SCALED, MEAN, DOT, D, BLOCK_D, BLOCK_R, TILE, STAGES, PDL)
        score_pages(
            ListQueries(p_row, q_strides, seqlen_q * group_size, group_size, scale),
            Summaries(p_low, p_high, p_scale, summary_strides, scale_strides),
            p_scores, table, i_b, i_h, first_page, stop_page, sizes,
        )  # fmt: skip
    if CHOOSE:
        if SCORE:
            tl.debug_barrier()  # makes scores stored by other threads of this program visible
        elif PDL:  # earlier reads need no wait: their data is older than the score kernel, which waited for it
            gdc_wait()
            gdc_launch_dependents()
        pages, chosen, place, count = choose_pages(
            p_scores, table, rule, i_b, i_h, seqused, leftpad, PAGED, PAGE, BLOCK_P
        )
        count = tl.minimum(count, slots)
        p_list = p_chosen + i_list.to(tl.int64) * slots
        tl.store(p_list + place, pages, mask=chosen & (place < slots))
        o_s = tl.arange(0, BLOCK_S)
        tl.store(p_list + o_s, -1, mask=(o_s >= count) & (o_s < slots))
        tl.store(p_counts + i_list, count)
    elif tl.program_id(1) == 0:
        fixed, share = tl.load(p_wanted + i_h), tl.load(p_wanted + kv_heads + i_h)
        count = count_pages(seqused, leftpad, fixed, share, rule, PAGE)
        tl.store(p_counts + i_list, tl.minimum(count, slots))


def select_pages(
    cache: PagedCache, q: Tensor, wanted: Tensor, sinks: int, window: int, slots: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the selected pages, like `kernels.decode.reference`."""
    chosen, counts, scores = _empty(cache, slots)
    lists, tiles, most = scores.shape[0], -(-cache.max_pages // _tile(cache)), processors(q.device)
    if 2 * lists < most:
        of_list = tiles
    elif tiles > FEW_TILES:
        of_list = PROGRAMS_PER_PROCESSOR * most // lists
    else:
        of_list = 1
    passes = [(1, True, True)] if tiles == 1 or of_list <= 1 else [(of_list, True, False), (1, False, True)]
    for programs, score, choose in passes:
        choice = PageChoice(scores, wanted, sinks, q.shape[1] + window - 1)
        _launch(q, cache, choice, chosen, counts, scale, programs=programs, score=score, choose=choose)
    return chosen, counts


def score_all_pages(
    q: Tensor, cache: PagedCache, wanted: Tensor, sinks: int, window: int, slots: int, scale: float
) -> tuple[Tensor, Tensor, PageChoice | None]:
    """Score all pages; select pages here if that is faster, otherwise leave it to the attention kernel.

    Selecting here is faster for 8-bit caches, where the attention kernel has half the registers: for 16 x 32k, it takes
    72 us if it also selects, and 51 us if not.

    Returns:
        (listed, counts, choice): (B, Hk, S) int32 pages of each list, uninitialized if `choice` is not None; their
        numbers (B, Hk) int32; arguments for a selection in the attention kernel, or None.
    """
    lists, most = cache.batch * cache.kv_heads, processors(q.device)
    many = lists * cache.max_pages > MANY_SCORES * most or cache.max_pages > MANY_PAGES
    if many or cache.k.dtype.itemsize == 1:
        return *select_pages(cache, q, wanted, sinks, window, slots, scale), None
    listed, counts, scores = _empty(cache, slots)
    choice = PageChoice(scores, wanted, sinks, q.shape[1] + window - 1)
    tiles = -(-cache.max_pages // _tile(cache))
    programs = max(1, min(tiles, PROGRAMS_PER_PROCESSOR * most // max(1, lists)))
    _launch(q, cache, choice, listed, counts, scale, programs=programs, score=True, choose=False)
    return listed, counts, choice


def _empty(cache: PagedCache, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate lists of pages, their counts, and the scores of all pages."""
    lists = torch.empty(cache.batch, cache.kv_heads, slots, dtype=torch.int32, device=cache.device)
    counts = torch.empty(cache.batch, cache.kv_heads, dtype=torch.int32, device=cache.device)
    return lists, counts, torch.empty(counts.numel(), cache.max_pages, dtype=torch.float32, device=cache.device)


def _tile(cache: PagedCache) -> int:
    """Return how many pages to score at a time."""
    assert cache.summaries is not None, "checked before"
    block = max(16, power_of_two(cache.max_pages))
    many = cache.batch * cache.kv_heads >= MANY_LISTS * processors(cache.device)
    most = PAGES_PER_TILE_OF_MANY if many else PAGES_PER_TILE
    return max(16, min(most, block, TILE_BYTES // (_block_d(cache) * cache.summaries.low.dtype.itemsize)))


def _block_d(cache: PagedCache) -> int:
    assert cache.summaries is not None, "checked before"
    least = 32 if cache.summaries.scale is not None else 16  # minimum depth of the matrix unit
    return max(least, padded(cache.head_dim))


def _launch(
    q: Tensor,
    cache: PagedCache,
    choice: PageChoice,
    chosen: Tensor,
    counts: Tensor,
    scale: float,
    *,
    programs: int,
    score: bool,
    choose: bool,
) -> None:
    assert cache.summaries is not None, "checked before"
    lists, max_pages, slots = counts.numel(), cache.max_pages, chosen.shape[2]
    if lists == 0:
        return
    q, group_size, tile = unit_stride(q), q.shape[2] // cache.kv_heads, _tile(cache)
    block = max(16, power_of_two(max_pages))
    _select_pages_fwd_kernel[(lists, programs)](
        q,
        cache.summaries.low,
        cache.summaries.high,
        cache.summaries.low if cache.summaries.scale is None else cache.summaries.scale,
        choice.scores,
        choice.wanted,
        chosen,
        counts,
        **table_arguments(cache),
        seqlen_q=q.shape[1],
        group_size=group_size,
        kv_heads=cache.kv_heads,
        max_pages=max_pages,
        sinks=choice.sinks,
        window=choice.window,
        slots=slots,
        scale=scale,
        q_strides=strides_of(q),
        summary_strides=row_strides(cache.summaries.strides()),
        scale_strides=row_strides(cache.summaries.scale_strides()),
        SCALED=cache.summaries.scale is not None,
        SCORE=score,
        CHOOSE=choose,
        MEAN=cache.summaries.low is cache.summaries.high,
        DOT=cache.summaries.low.dtype in (torch.bfloat16, torch.int8) and not interpreted(),
        PAGE=cache.page_size,
        D=cache.head_dim,
        BLOCK_D=_block_d(cache),
        BLOCK_R=min(QUERY_ROWS, power_of_two(q.shape[1] * group_size)),
        TILE=tile,
        BLOCK_P=block,
        BLOCK_S=power_of_two(max(1, slots)),
        STAGES=1 + TILES_AHEAD * (1 + cache.is_paged),  # the address of a page is loaded before its summary
        num_warps=WARPS if score else min(16, max(4, block // 256)),
        **gpu_of(q.device).overlap,
    )
