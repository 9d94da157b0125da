# SPDX-License-Identifier: Apache-2.0
"""Attention over a grid, without a model: exact at full density, masks of padding, any rule."""

import pytest
import torch

import dynaxx as dx
from dynaxx.errors import UnsupportedInputError
from dynaxx.policy.resolve import plan_of
from dynaxx.testing import make_qkv
from dynaxx.video import FirstFrames, Grid, GridWindow, RadialDecay, grid_attention
from dynaxx.video.attention import attend, padding_of

GRID = Grid(5, 7, 12, text=21, text_first=True)
MEAN = dx.MeanPool()
RULES = [
    GridWindow(1, 3, 3) | FirstFrames(),
    RadialDecay(1, 1),
    dx.TopK(0.2, MEAN, per="head"),
    dx.TopP(0.5, MEAN, per="head"),
    GridWindow(1) | dx.TopK((1, 2, 3), MEAN, per="head"),
]


def qkv():
    return make_qkv(2, GRID.seqlen, GRID.seqlen, 3, 3, 16)


def dense(q, k, v, mask=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@pytest.mark.parametrize("order", ["bars", "hilbert", "raster"])
@pytest.mark.parametrize("rule", [GridWindow(), dx.TopK(1.0), dx.TopP(1.0, dx.MeanPool())], ids=repr)
def test_everything_is_dense_attention(rule, order):
    q, k, v = qkv()
    grid = Grid(*GRID.shape, text=21, text_first=True, order=order)
    torch.testing.assert_close(grid_attention(q, k, v, grid, rule, block_size=16), dense(q, k, v))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_attend_where_their_layout_says(rule):
    q, k, v = qkv()
    plan = plan_of([rule] * 3 if not isinstance(rule, dx.Hybrid) else heads_of(rule), 3, (16, 32), causal=False)
    out, layout = attend(q, k, v, GRID, plan)
    shown = GRID.restored(GRID.restored(layout.to_dense(), 2), 3)
    torch.testing.assert_close(out, dense(q, k, v, shown))
    assert layout.density(causal=False) < 1
    text = shown[..., :21, :].all() and shown[..., :21].all()
    assert bool(text)


def heads_of(rule):
    """Return one rule per head of a hybrid with a budget per head."""
    budgets = rule.selector.budget
    return [dx.Hybrid(rule.pattern, dx.TopK(budget, MEAN, per="head")) for budget in budgets]


def test_padding_is_hidden_in_both_forms_of_masks():
    q, k, v = qkv()
    visible = torch.ones(2, GRID.seqlen, dtype=torch.bool)
    visible[1, 11:21] = False
    plan = plan_of([GridWindow()] * 3, 3, (16, 16), causal=False)
    keys = visible[:, None, None]
    bias = torch.zeros(keys.shape).masked_fill(~keys, torch.finfo(torch.float32).min)
    for mask in (keys, bias):
        out, _ = attend(q, k, v, GRID, plan, padding=padding_of(mask, q))
        torch.testing.assert_close(out, dense(q, k, v, keys))
    both = keys & visible[:, None, :, None]
    out, _ = attend(q, k, v, GRID, plan, padding=padding_of(both, q))
    torch.testing.assert_close(out, dense(q, k, v, both).nan_to_num())
    assert padding_of(None, q) is None


OTHER_MASKS = {
    "pairs": torch.eye(GRID.seqlen, dtype=torch.bool),
    "bias": torch.rand(1, 1, 1, GRID.seqlen),
    "heads": torch.rand(1, 3, GRID.seqlen, GRID.seqlen) > 0.5,
}


@pytest.mark.parametrize("mask", OTHER_MASKS.values(), ids=OTHER_MASKS)
def test_other_masks_are_refused(mask):
    with pytest.raises(UnsupportedInputError, match=r"padding|adds a bias"):
        padding_of(mask, qkv()[0])


def test_gradients():
    q, k, v = (x.double().requires_grad_() for x in qkv())
    found = torch.autograd.grad(grid_attention(q, k, v, GRID, GridWindow(), block_size=16).square().sum(), (q, k, v))
    expected = torch.autograd.grad(dense(q, k, v).square().sum(), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_lengths_are_named():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"`k` must be \(batch, 441 tokens of `grid`"):
        grid_attention(q, k[:, 1:], v, GRID, GridWindow())
