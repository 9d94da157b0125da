# SPDX-License-Identifier: Apache-2.0
"""Grids and their patterns: any size, each pattern against its definition token by token."""

import random

import numpy as np
import pytest
import torch

import dynaxx as dx
from dynaxx.policy import to_spec
from dynaxx.testing import check_pattern
from dynaxx.video import FirstFrames, Grid, GridWindow, RadialDecay, on_grid

SHAPES = [(1, 1, 1), (1, 9, 5), (2, 3, 7), (5, 7, 11), (4, 4, 4), (13, 3, 2), (6, 10, 9)]
ORDERS = ("bars", "hilbert", "raster")
RULES = {
    GridWindow(frames=3, height=5, width=4): lambda d: d[0] <= 1 and d[1] <= 2 and d[2] <= 2,
    GridWindow(frames=1): lambda d: d[0] == 0,
    GridWindow(height=3, width=1): lambda d: d[1] <= 1 and d[2] == 0,
    RadialDecay(8, 6): lambda d: (
        d[1] <= 8 * 2.0 ** -(int(np.log2(max(d[0], 1))) / 2) // 2
        and d[2] <= 6 * 2.0 ** -(int(np.log2(max(d[0], 1))) / 2) // 2
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_orders_hold_each_token_once_and_go_back(shape, order):
    for text, first in ((0, False), (5, True), (5, False)):
        grid = Grid(*shape, text=text, text_first=first, order=order)
        places = grid.permutation()
        assert places.sort().values.tolist() == list(range(grid.seqlen))
        x = torch.randn(2, grid.seqlen, 3)
        assert torch.equal(grid.restored(grid.ordered(x)), x)
        text_places = places[grid.tokens :].tolist()
        assert text_places == list(range(text)) if first else text_places == list(range(grid.tokens, grid.seqlen))


@pytest.mark.parametrize("shape", [(8, 8, 8), (1, 16, 16), (4, 4, 4)])
def test_hilbert_steps_to_neighbours(shape):
    grid = Grid(*shape, order="hilbert")
    at = np.stack(np.unravel_index(grid.permutation().numpy(), shape), -1)
    assert (np.abs(np.diff(at, axis=0)).sum(1) == 1).all()


@pytest.mark.parametrize("order", ["bars", "hilbert"])
@pytest.mark.parametrize("shape", [(21, 45, 80), (21, 30, 52), (1, 64, 64)])
def test_blocks_of_real_videos_are_compact(shape, order):
    grid = Grid(*shape, order=order)
    first = np.arange(0, grid.tokens, 64)
    boxes = grid.boxes(first, first + 63)
    assert (boxes.high - boxes.low + 1).prod(1).mean() < 1.25 * 64


def blocks_by_definition(rule, near, grid, block):
    """Return which pairs of blocks hold a visible pair of tokens or text; boxes stand for their blocks."""
    places = grid.permutation().numpy()[: grid.tokens] - grid.text * grid.text_first
    at = np.stack(np.unravel_index(places, grid.shape), -1)
    runs = [range(start, min(start + block, grid.seqlen)) for start in range(0, grid.seqlen, block)]
    found = np.zeros((len(runs), len(runs)), bool)
    for i, q in enumerate(runs):
        for j, k in enumerate(runs):
            if q[-1] >= grid.tokens or k[-1] >= grid.tokens:
                found[i, j] = True
                continue
            q_at, k_at = (at[list(run)] for run in (q, k))
            apart = [max(0, q_at[:, a].min() - k_at[:, a].max(), k_at[:, a].min() - q_at[:, a].max()) for a in range(3)]
            found[i, j] = near(apart)
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(5, 7, 11), (9, 4, 6), (1, 9, 5)])
@pytest.mark.parametrize("text", [0, 23])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_layouts_follow_the_definition(rule, text, shape, order):
    grid = Grid(*shape, text=text, text_first=True, order=order)
    layout = rule.on(grid).layout(grid.seqlen, causal=False, block_size=16)
    expected = blocks_by_definition(rule, RULES[rule], grid, 16)
    shown = layout.to_dense()[0, 0]
    whole = torch.from_numpy(expected).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(shown, whole[: grid.seqlen, : grid.seqlen])


def test_windows_show_every_pair_of_tokens_within_reach():
    grid = Grid(5, 7, 9, order="hilbert")
    shown = GridWindow(3, 3, 5).on(grid).layout(grid.seqlen, causal=False, block_size=16).to_dense()[0, 0]
    at = torch.stack(torch.unravel_index(grid.permutation(), grid.shape), -1)
    near = ((at[:, None] - at[None]).abs() <= torch.tensor([1, 1, 2])).all(-1)
    assert bool((shown | ~near).all())


def test_first_frames_see_and_are_seen():
    grid = Grid(6, 4, 4, text=10)
    rule = on_grid(GridWindow(1, 1, 1) | FirstFrames(), grid)
    shown = grid.restored(grid.restored(rule.layout(grid.seqlen, causal=False, block_size=16).to_dense()[0, 0], 0), 1)
    assert bool(shown[:16].all() and shown[:, :16].all() and shown[96:].all() and shown[:, 96:].all())
    assert not bool(shown.all())


def test_density_of_a_radial_window_falls_with_the_distance():
    grid = Grid(32, 8, 32)
    shown = RadialDecay(6, 24).on(grid).layout(grid.seqlen, causal=False, block_size=16).to_dense()[0, 0]
    shown = grid.restored(grid.restored(shown, 0), 1).float().view(32, 256, 32, 256).mean((1, 3))
    by_distance = [float(shown.diagonal(distance).mean()) for distance in (0, 6, 12, 24)]
    assert by_distance == sorted(by_distance, reverse=True)
    assert by_distance[0] > 1.7 * by_distance[-1]


def test_patterns_hold_to_what_the_library_asks_of_any():
    rng = random.Random(0)
    for kind in (GridWindow, RadialDecay, FirstFrames):
        for order in ORDERS:
            rule = kind.random(rng, 90).on(Grid(rng.randint(1, 6), 3, 5, order=order))
            check_pattern(rule, lengths=[(90, 90), (33, 90), (100, 90)], block_sizes=[16, (64, 32)])


def test_rules_are_data_and_ask_for_their_grid():
    rule = GridWindow(3, width=9) | FirstFrames() | dx.TopK(0.1)
    assert to_spec(rule).build() == rule
    with pytest.raises(ValueError, match="must be bound to a grid"):
        GridWindow(3).layout(64)
    with pytest.raises(ValueError, match="`frames` must be"):
        GridWindow(0)
    with pytest.raises(ValueError, match="`height` must be >= 1, got 0"):
        Grid(1, 0, 1)
    with pytest.raises(ValueError, match="`order` must be one of"):
        Grid(1, 1, 1, order="zigzag")
