# SPDX-License-Identifier: Apache-2.0
"""Decide which pages of a list are read: how many, from lengths alone, and which, from their scores."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dynaxx.kernels.decode.triton.best_pages import best_pages
from dynaxx.kernels.decode.triton.pages import physical_pages


class PageRule(NamedTuple):
    """The settings that decide, beside the scores, which pages a list reads."""

    p_wanted: Any  # (2, Hk) fp32
    kv_heads: Any
    max_pages: Any
    sinks: Any
    window: Any  # counted from the first query


@triton.jit
def _sinks_stop(leftpad, sinks):
    return tl.where(sinks > 0, leftpad + sinks, 0)


@triton.jit
def _wanted(fixed, share, first_page, stop_page):
    """Return how many pages to read in addition to those of sinks and window."""
    return (fixed + tl.ceil(share * tl.maximum(stop_page - first_page, 0).to(tl.float32))).to(tl.int32)


@triton.jit
def count_pages(seqused, leftpad, fixed, share, rule, PAGE: tl.constexpr):
    """Return how many pages lists of any shape read if all exist; `window` reaches back from the first query's page."""
    first_page, stop_page = leftpad // PAGE, tl.minimum(tl.cdiv(seqused, PAGE), rule.max_pages)
    stop_page = tl.maximum(stop_page, first_page)
    sinks_stop = tl.maximum(tl.minimum(tl.cdiv(_sinks_stop(leftpad, rule.sinks), PAGE), stop_page), first_page)
    window_start = tl.minimum(tl.maximum(seqused - rule.window, 0) // PAGE, stop_page)
    optional = tl.maximum(window_start - sinks_stop, 0)
    return stop_page - first_page - optional + tl.minimum(_wanted(fixed, share, first_page, stop_page), optional)


@triton.jit
def count_all_pages(p_seqused, p_leftpad, o_l, lists, slots, rule, HAS_LEFTPAD: tl.constexpr, PAGE: tl.constexpr):
    """Return `count_pages` for lists o_l, at most `slots`; 0 for lists that do not exist."""
    i_b, i_h, known = o_l // rule.kv_heads, o_l % rule.kv_heads, o_l < lists
    leftpad = tl.zeros(o_l.shape, tl.int32)
    if HAS_LEFTPAD:
        leftpad = tl.load(p_leftpad + i_b, mask=known, other=0)
    seqused = tl.load(p_seqused + i_b, mask=known, other=0)
    fixed = tl.load(rule.p_wanted + i_h, mask=known, other=0.0)
    share = tl.load(rule.p_wanted + rule.kv_heads + i_h, mask=known, other=0.0)
    counts = count_pages(seqused, leftpad, fixed, share, rule, PAGE)
    return tl.where(known, tl.minimum(counts, slots), 0)


@triton.jit
def choose_pages(
    p_scores, table, rule, i_b, i_h, seqused, leftpad, PAGED: tl.constexpr, PAGE: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Return all pages of a list, [BLOCK_P], whether each is selected, its rank among those, and their number."""
    pages = tl.arange(0, BLOCK_P)
    first_page, stop_page = leftpad // PAGE, tl.minimum(tl.cdiv(seqused, PAGE), rule.max_pages)
    known = (pages >= first_page) & (pages < stop_page)
    exists = physical_pages(table, i_b, pages, known, PAGED) >= 0
    forced = exists & ((pages * PAGE < _sinks_stop(leftpad, rule.sinks)) | ((pages + 1) * PAGE > seqused - rule.window))
    optional = exists & (forced == 0)
    fixed, share = tl.load(rule.p_wanted + i_h), tl.load(rule.p_wanted + rule.kv_heads + i_h)
    scores = tl.load(p_scores + pages, mask=optional, other=0.0)
    chosen, count = best_pages(scores, forced, optional, _wanted(fixed, share, first_page, stop_page))
    return pages, chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1, count
