# SPDX-License-Identifier: Apache-2.0
"""Gradients of all branches of native sparse attention on Hopper.

    compressed branch, window -> dk, dv, fp32 sums of dq -> dq;  selected blocks -> dk, dv, added to dq

The compressed branch and the window add dq to the same fp32 sums if they use one pass. Selected blocks, whose partial
results take the most memory, come last and add their dq to the result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dynaxx.kernels.attention.hopper.backward import gradients_of_rows, in_one_pass
from dynaxx.kernels.attention.hopper.backward_rows import BackwardCall, BackwardRows, dq_of_sums, empty_sums
from dynaxx.kernels.primitives.hopper.descriptors import dense_rows
from dynaxx.layout import BlockLayout
from dynaxx.trained.nsa.kernels.gpu.selected import SelectedPlan, selected_backward_of_rows
from dynaxx.trained.nsa.kernels.hopper.rows import BranchRows, batch_of


def mixed_backward(
    rows: BranchRows,
    inputs: Sequence[Tensor],
    plan: SelectedPlan,
    layouts: tuple[BlockLayout, BlockLayout],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs q, k, v, k_cmp and v_cmp, each (T, H, D); empties the list `rows.do`.

    Args:
        rows: result of `branch_rows`.
        inputs: q (T, Hq, D), k and v (M, Hk, D), k_cmp and v_cmp (compressed tokens, Hk, D).
        plan: plan of the selected branch.
        layouts: layouts of the compressed branch and of the window.
        scale: softmax scale.
    """
    q, k, v, k_cmp, v_cmp = inputs
    batch = batch_of(plan)
    as_batch = lambda x: dense_rows(x.unflatten(0, (batch, x.shape[0] // batch)))
    some_q, some_k, some_v, k_cmp, v_cmp = (as_batch(x) for x in (q, k, v, k_cmp, v_cmp))
    fused = [in_one_pass(some_q, *each) for each in zip((k_cmp, some_k), layouts, strict=True)]
    sums = empty_sums(rows.cmp.delta, q.shape[2]).zero_() if any(fused) else None
    cmp, swa = (x._replace(sums=sums if one else None) for x, one in zip((rows.cmp, rows.swa), fused, strict=True))
    dq, dk_cmp, dv_cmp = _over_layout(as_batch(rows.do.pop(0)), some_q, k_cmp, v_cmp, cmp, layouts[0], scale)
    dq_swa, dk, dv = _over_layout(as_batch(rows.do.pop()), some_q, some_k, some_v, swa, layouts[1], scale)
    if dq_swa is not None:
        dq = dq_swa if dq is None else dq.add_(dq_swa)
    if sums is not None:
        dq = dq_of_sums(sums, some_q, layouts[1], scale, dq)
    assert dq is not None, "a window is never empty"
    del sums, cmp, swa, dq_swa
    dq, dk, dv, dk_cmp, dv_cmp = (x.flatten(0, 1) for x in (dq, dk, dv, dk_cmp, dv_cmp))
    if plan.indices.shape[2]:
        dq, dk_slc, dv_slc = selected_backward_of_rows(rows.do.pop(), q, k, v, rows.slc, plan, scale, dq)
        dk, dv = dk.add_(dk_slc), dv.add_(dv_slc)
    return dq, dk, dv, dk_cmp, dv_cmp


def _over_layout(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: BackwardRows, layout: BlockLayout, scale: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return dq, dk and dv of attention over a layout; dq is None if it is 0 or was added to the sums."""
    if k.shape[1] == 0:
        return None, torch.zeros_like(k), torch.zeros_like(v)
    return gradients_of_rows(BackwardCall(do, q, k, v, rows, layout, scale))
