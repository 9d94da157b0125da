# SPDX-License-Identifier: Apache-2.0
"""Residual sharing between denoising steps, after DiTFastAttn: few blocks, and what they lacked at the last refresh.

At a refresh a layer attends by its rule and by a denser one, and returns the denser output. It keeps the blocks that
its rule chose, and by how much their output differs from the denser one. At the steps until the next refresh it attends
to the kept blocks, and adds the difference. Blocks that are chosen anew at every step lose half of the gain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.errors import UnsupportedInputError
from dynaxx.layout import BlockLayout
from dynaxx.policy import LayerPlan
from dynaxx.video.attention import Padding, attend
from dynaxx.video.grid import Grid

MAX_CALLS = 8  # calls of one step, as of guidance, that keep differences; bounds the memory


class Kept(NamedTuple):
    """The blocks of a refresh, and the difference that they leave."""

    period: tuple[float, int]  # see `VideoPolicy.period`
    layout: BlockLayout  # the blocks that the layer's rule chose, in the grid's order
    difference: Tensor  # (batch, seqlen, heads, head_dim): the denser output - that of `layout`, in the model's order

    def serves(self, period: tuple[float, int], q: Tensor) -> bool:
        """Return whether it belongs to a period, and fits these queries."""
        mine = self.difference
        fits = (mine.shape[:3], mine.dtype, mine.device) == (q.shape[:3], q.dtype, q.device)
        return self.period == period and fits


class Residuals:
    """The residuals that one layer shares between the steps of a run.

    Calls of a step, such as those with and without a prompt, must come in the same order at every step. A run ends with
    its last step; a step back or another number of steps is a new run.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}  # by the number of the call within its step
        self._step, self._call = (-1, 0), 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        plan: LayerPlan,
        denser: LayerPlan | None,
        *,
        step: tuple[int, int],
        period: tuple[float, int],
        padding: Padding | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, list[BlockLayout]]:
        """Return attention of (batch, seqlen, heads, head_dim), and the layouts that it visited.

        At a refresh these are the layout of `denser`, and that of `plan` if its difference is kept.

        Args:
            q: (batch, seqlen, heads, head_dim) in the model's order.
            k: as `q`.
            v: as `q`.
            grid: the tokens.
            plan: the rules between refreshes.
            denser: the rules of refreshes; None attends by `plan` at every step.
            step: the step, and the number of all steps.
            period: `VideoPolicy.period` of the step.
            padding: tokens to hide.
            scale: softmax scale, default head_dim ** -0.5.

        Raises:
            UnsupportedInputError: gradients are asked for, which would reach back to other steps.
        """
        if denser is None:
            out, visited = attend(q, k, v, grid, plan, padding=padding, scale=scale)
            return out, [visited]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise UnsupportedInputError("gradients", {"`refresh`": ["run under torch.no_grad(), or leave it out"]})
        if step[0] < self._step[0] or step[1] != self._step[1]:
            self._kept.clear()
        self._call = self._call + 1 if step == self._step else 0
        self._step = step
        kept = self._kept.pop(self._call, None)
        keep = step[0] < step[1] - 1 and self._call < MAX_CALLS
        if kept is not None and kept.serves(period, q):
            few, _ = attend(q, k, v, grid, plan, padding=padding, scale=scale, layout=kept.layout)
            if keep:
                self._kept[self._call] = kept
            return few + kept.difference, [kept.layout]
        out, visited = attend(q, k, v, grid, denser, padding=padding, scale=scale)
        if not keep:
            return out, [visited]
        few, layout = attend(q, k, v, grid, plan, padding=padding, scale=scale)
        self._kept[self._call] = Kept(period, layout, out - few)
        return out, [visited, layout]
