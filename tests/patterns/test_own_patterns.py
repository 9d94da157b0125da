# SPDX-License-Identifier: Apache-2.0
"""Patterns, scorers and selectors of one's own: mistakes are said in words, and `check_pattern` finds silent ones."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import dynaxx as dx
from dynaxx.patterns.base import Pattern, Visited
from dynaxx.patterns.runs import Runs
from dynaxx.selection import Scorer, Selector
from dynaxx.testing import check_pattern, random_pattern


def before(q_pos, k_pos):
    return k_pos // 100 == q_pos // 100 - 1


def runs_before(grid):
    first, last = grid.spans()
    begin = (first // 100 - 1).clip(0) * 100 // grid.block_size[1]
    return Runs.one(begin, -(-(last // 100 * 100) // grid.block_size[1]))


@dataclass(frozen=True)
class Own(Pattern):
    """The 100 keys before the query's own chunk, unless a function gives something else."""

    shown: object = before
    visits: object = lambda grid: Visited(runs_before(grid), Runs.none())

    def visible(self, grid, q_pos, k_pos):
        return self.shown(q_pos, k_pos)

    def visited(self, grid):
        return self.visits(grid)


@dataclass(frozen=True)
class Unhashable(Own):
    numbers: list = field(default_factory=list)


def test_right_patterns_pass():
    check_pattern(Own())
    check_pattern(Own() | dx.SlidingWindow(9), lengths=[(70, 130)], block_sizes=[32])
    rng = random.Random(0)
    for _ in range(10):
        check_pattern(random_pattern(rng, 90), lengths=[(90, 90)], block_sizes=[16, (64, 32)])


everything = lambda grid: Runs.one(np.zeros(grid.q_blocks, int), np.full(grid.q_blocks, grid.kv_blocks))
SILENT = {
    "forgets blocks": (lambda grid: Visited(Runs.none(), Runs.none()), "must be among the touched blocks"),
    "fills too much": (lambda grid: Visited(everything(grid), everything(grid)), "must not be among the filled blocks"),
    "fills alone": (lambda grid: Visited(Runs.none(), everything(grid)), "without touching it"),
}


@pytest.mark.parametrize(("visits", "said"), SILENT.values(), ids=SILENT)
def test_check_pattern_finds_what_no_layout_would_say(visits, said):
    with pytest.raises(ValueError, match=said):
        check_pattern(Own(visits=visits), lengths=[(300, 300)])


LOUD = {
    "floats": (Own(lambda q, k: before(q, k).float()), TypeError, "`visible` of Own must return a bool tensor"),
    "nothing": (Own(lambda q, k: None), TypeError, "must return a bool tensor, got NoneType"),
    "another shape": (Own(lambda q, k: torch.ones(3, 3) > 0), ValueError, "to which q_pos and k_pos broadcast"),
    "no visited": (Own(visits=lambda grid: None), TypeError, "must return Visited.touched=Runs"),
    "other rows": (Own(visits=lambda grid: Visited(Runs.one(np.zeros(2, int), np.ones(2, int)), Runs.none())),
                   ValueError, "`touched` of Own.visited must have starts and ends .n, 5 rows"),
    "not hashable": (Unhashable(), TypeError, "must be hashable, because layouts are cached by value"),
}  # fmt: skip


@pytest.mark.parametrize(("pattern", "error", "said"), LOUD.values(), ids=LOUD)
def test_other_mistakes_are_said_where_the_layout_is_built(pattern, error, said):
    for rule in (pattern, pattern | dx.Sink(1)):
        with pytest.raises(error, match=said):
            rule.layout(300, block_size=64)


@dataclass(frozen=True)
class Scores(Scorer):
    change: object

    def prepare(self, q, k, grid, scale, *, memory_budget=0):
        return lambda start, stop: self.change(torch.zeros(q.shape[0], q.shape[2], stop - start, grid.kv_blocks))


@dataclass(frozen=True)
class Choice(Selector):
    change: object
    scorer = dx.MeanPool()
    budget_field = "change"

    def choose(self, scores, optional, visible):
        return self.change(optional.expand(scores.shape))


@pytest.mark.parametrize("change", [lambda x: None, lambda x: x[..., 1:], lambda x: x.int()])
def test_scorers_and_selectors_are_told_what_they_must_give(change):
    q, k = torch.randn(1, 100, 4, 8), torch.randn(1, 100, 2, 8)
    for rule, what in ((dx.TopK(2, Scores(change)), "Scores must give scores"), (Choice(change), "Choice must give a")):
        with pytest.raises((TypeError, ValueError), match=what):
            dx.select_blocks(q, k, rule, block_size=16)
    for rule in (dx.TopK(2, Scores(torch.Tensor.half)), Choice(torch.clone)):
        dx.select_blocks(q, k, rule, block_size=16).validate()


def test_a_pattern_and_a_selector_combine_in_either_order():
    window, sink, best = dx.SlidingWindow(4), dx.Sink(1), dx.TopK(3)
    assert best | window == window | best
    assert (best | window) | sink == (window | sink) | best
    assert sink | (best | window) == (window | sink) | best
    with pytest.raises(TypeError, match="unsupported operand"):
        best | best
