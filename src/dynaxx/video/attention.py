# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over the tokens of a grid: bring them into the grid's order, choose blocks, attend, and go back."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.layout import BlockLayout, as_block_size
from dynaxx.layout.hide_keys import hide_keys
from dynaxx.ops import sparse_attention
from dynaxx.policy import LayerPlan
from dynaxx.policy.resolve import plan_of
from dynaxx.policy.specs import AttentionRule
from dynaxx.video.grid import Grid
from dynaxx.video.patterns import on_grid

ROWS = 1024  # rows of a mask to compare at a time


class Padding(NamedTuple):
    """Tokens that do not exist, such as padded text."""

    visible: Tensor  # (batch, seqlen) bool
    blank: bool  # whether the output of the others is zero; otherwise they see what all queries see


@typed
def grid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    rule: AttentionRule,
    *,
    block_size: int | tuple[int, int] = 64,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend over the blocks that a rule shows of a grid, exactly and in both directions. Differentiable.

    Args:
        q: (batch, seqlen, heads, head_dim) in the model's order, where seqlen is that of `grid`.
        k: keys of the same tokens.
        v: values of the same tokens.
        grid: the tokens.
        rule: a `GridPattern` such as `GridWindow`, a selector such as `TopK(0.1)`, or both joined by `|`.
        block_size: tokens per block, or (q_block, kv_block).
        scale: softmax scale, default head_dim ** -0.5.
        backend: as for `sparse_attention`.

    Returns:
        (batch, seqlen, heads, head_dim) in the model's order.

    Raises:
        ValueError: q, k or v are not for the grid's tokens, or do not match each other.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[1] != grid.seqlen:
            raise ValueError(
                f"`{name}` must be (batch, {grid.seqlen} tokens of `grid`, heads, head_dim), got {tuple(x.shape)}"
            )
    plan = plan_of([rule] * q.shape[2], k.shape[2], as_block_size(block_size), causal=False)
    return attend(q, k, v, grid, plan, scale=scale, backend=backend)[0]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    plan: LayerPlan,
    *,
    layout: BlockLayout | None = None,
    padding: Padding | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, BlockLayout]:
    """Return attention by a layer's plan, and the layout of blocks that it visited.

    Args:
        q: (batch, seqlen, heads, head_dim) in the model's order.
        k: as `q`.
        v: as `q`.
        grid: the tokens.
        plan: the rules of all heads; they are bound to the grid here.
        layout: the blocks to visit in the grid's order, in place of those that the plan chooses.
        padding: tokens to hide.
        scale: softmax scale, default head_dim ** -0.5.
        backend: as for `sparse_attention`.
    """
    q, k, v = (grid.ordered(x) for x in (q, k, v))
    if layout is None:
        layout = bound_plan(plan, grid).layout(q.detach(), k.detach(), scale=scale)
        if padding is not None:
            layout = hide_keys(layout, grid.ordered(padding.visible))
    out = grid.restored(sparse_attention(q, k, v, layout, scale=scale, backend=backend))
    if padding is not None and padding.blank:
        out = out.masked_fill(~padding.visible[:, :, None, None], 0.0)
    return out, layout


@lru_cache(maxsize=1024)
def bound_plan(plan: LayerPlan, grid: Grid) -> LayerPlan:
    """Return a layer's plan with its rules bound to a grid."""
    return replace(plan, groups=tuple(replace(group, rule=on_grid(group.rule, grid)) for group in plan.groups))


def padding_of(mask: Tensor | None, q: Tensor) -> Padding | None:
    """Return the padding that a mask describes. Reads back from the device.

    Args:
        mask: bool, or floats with 0 for visible pairs; a shape that broadcasts to (batch, heads, seqlen, seqlen).
        q: (batch, seqlen, heads, head_dim).

    Raises:
        UnsupportedInputError: the mask hides other pairs than those of padding, or adds a bias.
    """
    if mask is None:
        return None
    mask = mask.view((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            raise UnsupportedInputError("a mask", {"grid": ["it adds a bias to the scores"]})
        mask = ~hidden
    visible, blank = mask[:, 0, -1], mask.shape[2] > 1
    if blank:
        visible = mask[:, 0].diagonal(dim1=1, dim2=2)
        some = zip(mask[:, 0].split(ROWS, 1), visible.split(ROWS, 1), strict=True)
        if any(not torch.equal(rows, own[:, :, None] & visible[:, None]) for rows, own in some) or mask.shape[1] > 1:
            raise UnsupportedInputError("a mask", {"grid": ["it hides other pairs than those of padding"]})
    return Padding(visible.expand(q.shape[:2]), blank)
