# SPDX-License-Identifier: Apache-2.0
"""Blocks chosen by the core: those of torch, at every instruction set, whatever the lengths, budgets and patterns."""

import itertools
import math

import pytest
import torch

import dynaxx as dx
from dynaxx.core import library
from dynaxx.kernels.selection.cpu import best_blocks
from dynaxx.layout import BlockGrid
from dynaxx.selection import TileQueries, in_core
from isas import ISAS


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    if library.active_library() is None:
        pytest.skip("no compiler")
    return request.param


@pytest.fixture
def both(monkeypatch):
    """Return a function that chooses blocks in the core and in torch, and checks that the core was asked."""

    def choose(q, k, rule, **options):
        monkeypatch.undo()
        asked = []
        run = best_blocks.best_blocks
        monkeypatch.setattr(best_blocks, "best_blocks", lambda *given: asked.append(1) or run(*given))
        found = dx.select_blocks(q, k, rule, **options)
        assert asked, "the core did not choose"
        monkeypatch.setattr(in_core, "serves", lambda *_: False)
        expected = dx.select_blocks(q, k, rule, **options)
        monkeypatch.undo()
        return found, expected

    return choose


def assert_same(found, expected):
    found.validate()
    for name in ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.masks.bits, expected.masks.bits)


PATTERNS = [
    None,
    dx.Sink(32) | dx.LocalBlocks(2) | dx.LastQueries(40),
    dx.SlidingWindow(50),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=["none", "forced", "window"])
@pytest.mark.parametrize(
    ("scorer", "block_size"),
    [
        (dx.MeanQuery(), (32, 32)),
        (dx.MeanQuery(sharpness=0.4), (16, 64)),
        (TileQueries(8), (32, 16)),
        (TileQueries(16), (128, 32)),
        (TileQueries(4), (64, 64)),
    ],
    ids=["mean", "mean-16x64", "tile-8", "tile-16", "tile-4"],
)
def test_the_core_chooses_what_torch_chooses(both, scorer, block_size, pattern):
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator)
    for lengths, heads, dim, causal in [
        ((1, 1), (3, 1), 16, True),
        ((129, 129), (5, 1), 17, True),
        ((300, 700), (6, 2), 64, True),
        ((700, 300), (2, 2), 8, True),  # the first queries see nothing
        ((333, 65), (4, 2), 48, False),
    ]:
        q = normal(2, lengths[0], heads[0], 2 * dim)[..., :dim]
        k = normal(2, heads[1], lengths[1], dim).transpose(1, 2)
        shares = tuple((0.0, 0.1, 0.5, 1.0, 0.3, 0.25)[: heads[0]])
        for budget, floor, per in ((shares, 4, "head"), (3, 0, "head"), (shares, 4, "group"), (0.2, 0, "group")):
            selector = dx.TopK(budget, scorer, floor, per)
            rule = selector if pattern is None else pattern | selector
            assert_same(*both(q, k, rule, block_size=block_size, causal=causal))


def test_every_instruction_set_chooses_alike(isa, both):
    torch.manual_seed(1)
    q, k = torch.randn(1, 517, 6, 40), torch.randn(1, 517, 2, 40)
    for scorer, per in itertools.product((dx.MeanQuery(), TileQueries(8)), ("head", "group")):
        rule = PATTERNS[1] | dx.TopK((0.1, 0.2, 0.3, 0.0, 1.0, 0.4), scorer, per=per)
        assert_same(*both(q, k, rule, block_size=32))


def test_of_equal_blocks_the_first_ones_are_chosen(isa):
    q, k = torch.zeros(1, 256, 1, 16), torch.zeros(1, 256, 1, 16)
    for scorer in (dx.MeanQuery(), TileQueries(8)):
        layout = dx.select_blocks(q, k, dx.TopK(3, scorer, per="head"), block_size=16, causal=False)
        assert layout.kv_indices.view(16, 3).tolist() == [[0, 1, 2]] * 16


def test_far_scores_keep_their_order(isa):
    k = torch.zeros(1, 64, 1, 16)
    k[0, :, 0, 0] = -100.0 * torch.arange(4).repeat_interleave(16)
    q = torch.ones(1, 16, 1, 16)
    for count in (1, 2, 3):  # blocks whose mass is 0 in fp32 are still in order
        layout = dx.select_blocks(q, k, dx.TopK(count, dx.MeanQuery(), per="head"), block_size=16, causal=False)
        assert layout.kv_indices.tolist() == list(range(count))


def test_nan_spoils_no_head_that_chooses_alone(isa, both):
    torch.manual_seed(2)
    q, k = torch.randn(1, 160, 4, 16), torch.randn(1, 160, 2, 16)
    spoiled = q.clone()
    spoiled[0, 70:90, 1] = torch.nan
    for scorer in (dx.MeanQuery(), TileQueries(8)):
        rule = dx.TopK(0.4, scorer, per="head")
        before, after = (dx.select_blocks(x, k, rule, block_size=32).to_dense() for x in (q, spoiled))
        assert torch.equal(before[:, [0, 2, 3]], after[:, [0, 2, 3]])
        assert torch.equal(before[:, 1, :64], after[:, 1, :64])
        assert torch.equal(before[:, 1, 96:], after[:, 1, 96:])
    together = dx.TopK(0.4, dx.MeanQuery())  # what NaN scores reaches the output
    assert torch.equal(*(x.kv_indices for x in both(spoiled, k, together, block_size=32)))
    everything = dx.select_blocks(spoiled, k, dx.TopK(1.0, per="head"), block_size=32)
    assert everything.density() == 1.0


def test_threads_do_not_change_the_choice():
    torch.manual_seed(3)
    q, k = torch.randn(1, 900, 6, 32), torch.randn(1, 900, 2, 32)
    rule, before, found = dx.TopK(0.2, TileQueries(8), per="head"), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(dx.select_blocks(q, k, rule, block_size=32))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert_same(other, found[0])


def test_a_default_device_does_not_matter():
    q, k = torch.randn(1, 96, 4, 16), torch.randn(1, 96, 2, 16)
    rule = dx.Sink(7) | dx.TopK(0.3, TileQueries(4), per="head")
    expected = rule.select(q, k, block_size=32)
    in_core._given.cache_clear()
    in_core._counts.clear()
    with torch.device("meta"):
        found = rule.select(q, k, block_size=32)
    assert_same(found, expected)


def test_the_core_serves_plain_fp32_choices_by_count():
    q, k, grid = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 2, 16), BlockGrid(64, 64, (32, 32))
    serves = lambda selector, q=q, k=k, budget=1 << 20: in_core.serves(q, k, grid, selector, budget)
    alone = dx.TopK(0.5, per="head")
    assert serves(alone)
    assert serves(dx.TopK(0.5))  # heads of a group choose together
    assert not serves(dx.TopP(0.5, per="head"))
    assert not serves(dx.Threshold(0.1, per="head"))
    assert not serves(dx.TopK(0.5, dx.MinMax(), per="head"))
    assert not serves(dx.TopK(0.5, TileQueries(1), per="head"))  # 32 tiles per row
    assert not serves(alone, q.bfloat16(), k.bfloat16())
    assert not serves(alone, q, k.to("meta"))
    assert not serves(alone, q, torch.nn.Parameter(k))
    assert not serves(alone, q.transpose(1, 3), k.transpose(1, 3))
    assert not serves(alone, budget=1)


def test_wrong_arguments_are_refused(isa):
    q, k, grid = torch.randn(1, 64, 3, 16), torch.randn(1, 64, 2, 16), BlockGrid(64, 64, (32, 32))
    counts, optional = torch.ones(3, 2, dtype=torch.int32), torch.ones(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="core"):
        best_blocks.best_blocks(q, k, counts, optional, grid, 32, math.log2(math.e))  # three heads for two
