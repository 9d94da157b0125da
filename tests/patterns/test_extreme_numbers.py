# SPDX-License-Identifier: Apache-2.0
"""Extreme numbers: patterns and selectors clip them to the sequence, or refuse them at once."""

import time
import tracemalloc

import pytest
import torch

import dynaxx as dx
from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import Causal
from dynaxx.patterns.build import numpy_layout
from dynaxx.patterns.compressed import Compressed

HUGE = (2**31, 2**63 - 1, 2**63 + 300, 10**30)
SEQLEN = 100


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize(
    ("make", "same"),
    [
        (dx.LastQueries, dx.Full()),
        (dx.Sink, dx.Full()),
        (dx.GlobalTokens, dx.Full()),
        (lambda n: dx.GlobalTokens((0, n)), dx.GlobalTokens((0,))),
        (lambda n: dx.GlobalTokens((0, n), symmetric=True), dx.GlobalTokens((0,), symmetric=True)),
        (dx.SlidingWindow, dx.Full()),
        (lambda n: dx.SlidingWindow((n, n)), dx.Full()),
        (dx.Strided, dx.SlidingWindow(1)),
        (lambda n: dx.Dilated(n, 1), dx.Full()),
        (lambda n: dx.Dilated(3, n), dx.SlidingWindow(1)),
        (lambda n: dx.Dilated(n, n), dx.SlidingWindow(1)),
        (dx.LocalBlocks, dx.LocalBlocks(1000)),
        (dx.RandomBlocks, dx.Full()),
        (lambda n: dx.RandomBlocks(10**6, seed=n), dx.Full()),
    ],
)
def test_a_pattern_clips_its_numbers_to_the_grid(make, same, number):
    pattern, started = make(number), time.monotonic()
    for causal in (True, False):
        grid = BlockGrid(SEQLEN, SEQLEN, (16, 16), causal)
        wanted = same.layout(SEQLEN, causal=causal, block_size=16).to_dense()
        found = pattern.layout(SEQLEN, causal=causal, block_size=16)
        assert torch.equal(found.to_dense(), wanted)
        rule = pattern & Causal() if causal else pattern
        assert torch.equal(numpy_layout(rule, grid, torch.device("cpu")).to_dense(), wanted)
        position = torch.arange(SEQLEN)
        shown = pattern.visible(grid, position[:, None], position)
        shown = shown & (position <= position[:, None]) if causal else shown
        assert torch.equal(shown.expand(SEQLEN, SEQLEN), wanted[0, 0])
    assert time.monotonic() - started < 20


def test_many_sinks_take_no_memory_that_the_grid_does_not():
    tracemalloc.start()
    grid = BlockGrid(SEQLEN, SEQLEN, (16, 16), causal=True)
    numpy_layout(dx.Sink(500_000_000) & Causal(), grid, torch.device("cpu"))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("number", [10**12, 10**19, 10**30])
@pytest.mark.parametrize(
    "make",
    [
        dx.TopK,
        lambda n: dx.TopK(1.0, floor=n),
        lambda n: dx.TopK(2, scorer=dx.AntiDiagonal(n)),
        lambda n: dx.TopK(2, scorer=dx.MeanPool(n)),
    ],
)
def test_a_selector_clips_its_numbers(make, number):
    q = torch.randn(1, SEQLEN, 2, 16)
    started = time.monotonic()
    layout = dx.select_blocks(q, q[:, :, :1].contiguous(), make(number), block_size=16)
    assert layout.nnz > 0
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "make",
    [
        lambda n: dx.trained.NsaSizes(slc_count=n),
        lambda n: dx.trained.NsaSizes(window=n * 10**6),
        lambda n: Compressed(32, n * 10**6),
        lambda n: Compressed(32, 16, n * 10**6),
    ],
)
def test_sizes_that_would_hang_or_fill_the_memory_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make(10**9)


@pytest.mark.parametrize("number", [10**19, 10**30, 10**400])
def test_page_budgets_are_clipped_to_the_cache(number):
    k = torch.randn(2, 320, 2, 16)
    cache = dx.summarize_pages(dx.PagedCache.contiguous(k, k, page_size=16))
    q = torch.randn(2, 1, 4, 16)
    wanted = dx.sparse_decode(q, cache)
    for budget in (dx.PageBudget(number), dx.PageBudget(1, sinks=number), dx.PageBudget(1, window=number)):
        for backend in ("cpu", "reference"):
            found = dx.sparse_decode(q, cache, budget, backend=backend)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert dx.summarize_pages(cache, new_tokens=number) is cache


def test_token_ids_beyond_the_request_match_nothing():
    rule = dx.GlobalContent(token_ids=(5, 2**70), sequences=((7, 2**40),), span=10**30)
    ids = torch.tensor([1, 5, 7, 2], dtype=torch.int32)
    assert rule.resolve(ids).tokens == (1, 2, 3)
