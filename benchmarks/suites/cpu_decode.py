# SPDX-License-Identifier: Apache-2.0
"""Time decoding on this machine: one query over a long cache, pages chosen and read, beside the best dense SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dynaxx.layout.paging import PagedCache
from dynaxx.ops.decode import select_pages, sparse_decode, summarize_pages
from dynaxx.selection.pages import PageBudget
from dynaxx.testing import oracle_attention
from dynaxx.testing.oracle import error_reports

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
SHARE = 0.1

Medians = Callable[[dict[str, Callable[[], object]], int], dict[str, float]]


def time_decode(medians: Medians, seed: int, say: Callable[[str], None], seqlen: int = 32768) -> list[dict[str, Any]]:
    """Time one decoding step through `sparse_decode`, selection included, with pages of 64 and of 16 tokens.

    Dense is SDPA with `enable_gqa`, and with the heads of a group regrouped as rows, whichever is faster.

    Raises:
        RuntimeError: the step is wrong; then there are no times.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 1, KV_HEADS * GROUP, HEAD_DIM, generator=generator, dtype=torch.float32, device="cpu")
    k, v = torch.randn(
        2, 1, KV_HEADS, seqlen, HEAD_DIM, generator=generator, dtype=torch.float32, device="cpu"
    )  # memory order of a kv cache
    rows = q.view(1, KV_HEADS, GROUP, HEAD_DIM)
    runs: dict[str, Callable[[], object]] = {
        "enable_gqa": lambda: scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True),
        "groups as rows": lambda: scaled_dot_product_attention(rows, k, v),
    }
    steps = {page_size: _step(q, k, v, page_size) for page_size in (64, 16)}
    times = medians({**runs, **{str(page_size): step for page_size, step in steps.items()}}, 9)
    dense = min(times["enable_gqa"], times["groups as rows"])
    found = []
    for page_size in steps:
        row = {
            "seqlen": seqlen,
            "page_size": page_size,
            "share": SHARE,
            "ms": 1e3 * times[str(page_size)],
            "sdpa_ms": 1e3 * dense,
            "times_faster": dense / times[str(page_size)],
        }
        found.append(row)
        say(
            f"decode, {seqlen} keys, {SHARE:.0%} of pages of {page_size}: {row['ms']:.2f} ms with selection, dense "
            f"{row['sdpa_ms']:.1f} ms, {row['times_faster']:.1f}x faster"
        )
    return found


def _step(q: Tensor, k: Tensor, v: Tensor, page_size: int) -> Callable[[], Tensor]:
    """Return a step that was checked against fp64."""
    cache = summarize_pages(PagedCache.contiguous(k.transpose(1, 2), v.transpose(1, 2), page_size=page_size))
    budget = PageBudget(math.ceil(SHARE * cache.max_pages) - 1)  # beside the last page, which is always read
    pages = select_pages(q, cache, budget)
    mask = torch.zeros(KV_HEADS, cache.max_pages, dtype=torch.bool, device="cpu").scatter_(1, pages[0].long(), True)
    mask = mask.repeat_interleave(page_size, 1).repeat_interleave(GROUP, 0)[None, :, None]
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    exact, _ = oracle_attention(q.double(), keys.double(), values.double(), mask)
    eager, _ = oracle_attention(q, keys, values, mask)
    (report,) = error_reports(("out of a decoding step",), (sparse_decode(q, cache, budget),), (eager,), (exact,))
    if not report.ok:
        raise RuntimeError(f"no times: {report}")
    return lambda: sparse_decode(q, cache, budget)
