# SPDX-License-Identifier: Apache-2.0
"""Per-query inputs of the backward of native sparse attention: gate times do, lse and delta for each branch.

    do, branches, gates, lse -> gate * do, lse and delta per branch;  gradient of the gates

One kernel reads do once for all branches, and also computes the gradient of the gates.

Legend: T = B N queries, Hq q heads, E head_dim.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.attention.hopper.backward_rows import BackwardRows, empty_rows
from dynaxx.kernels.primitives.numbers import LOG2E
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout import BlockLayout
from dynaxx.trained.nsa.kernels.gpu.selected import SelectedPlan

TILE_ROWS = 16


class Branches(NamedTuple):
    """Forward results of the three branches."""

    cmp: Tensor  # (T, Hq, E)
    slc: Tensor
    swa: Tensor
    cmp_lse: Tensor  # (Hq, T) fp32
    slc_lse: Tensor
    swa_lse: Tensor


@kernel_launcher
@triton.jit(do_not_specialize=["rows", "seqlen_q", "padded_q", "q_heads"])
def _nsa_hopper_bwd_rows_kernel(
    p_do, p_cmp, p_slc, p_swa, p_dcmp, p_dslc, p_dswa,  # (T, Hq, E) contiguous
    p_cmp_lse, p_slc_lse, p_swa_lse,  # (Hq, T) fp32
    p_gates, p_dgates,  # (T, Hq, 3)
    p_cmp_rows, p_swa_rows,  # (2, B, Hq, padded_q) fp32: lse in base 2, and delta
    p_slc_rows,  # (T, Hq, 2) fp32: lse and delta
    rows,  # B * padded_q * Hq
    seqlen_q, padded_q, q_heads,
    E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute each branch's gate times do, lse and delta; rows that see nothing have lse = inf, delta = 0."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_h, place = row % q_heads, row // q_heads
    i_b, pos_q = place // padded_q, place % padded_q
    inside = (row < rows) & (pos_q < seqlen_q)
    t = i_b * seqlen_q + pos_q
    at = t * q_heads + i_h
    at_lse = i_h * (rows // (padded_q * q_heads)) * seqlen_q + t
    at_row = (i_b * q_heads + i_h) * padded_q + pos_q
    offsets = at[:, None] * E + tl.arange(0, E)[None, :]
    b_do = tl.load(p_do + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    for i_branch in tl.static_range(3):
        if i_branch == 0:
            p_x, p_grad, p_lse = p_cmp, p_dcmp, p_cmp_lse
        elif i_branch == 1:
            p_x, p_grad, p_lse = p_slc, p_dslc, p_slc_lse
        else:
            p_x, p_grad, p_lse = p_swa, p_dswa, p_swa_lse
        b_x = tl.load(p_x + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
        gate = tl.load(p_gates + at * 3 + i_branch, mask=inside, other=0.0).to(tl.float32)
        grad = (gate[:, None] * b_do).to(p_grad.dtype.element_ty)
        tl.store(p_grad + offsets, grad, mask=inside[:, None])
        d_gate = tl.sum(b_do * b_x, 1)
        tl.store(p_dgates + at * 3 + i_branch, d_gate.to(p_dgates.dtype.element_ty), mask=inside)
        lse = tl.load(p_lse + at_lse, mask=inside, other=float("-inf"))
        empty = lse == float("-inf")
        delta = tl.where(empty, 0.0, tl.sum(grad.to(tl.float32) * b_x, 1))
        if i_branch == 1:
            tl.store(p_slc_rows + at * 2, tl.where(empty, float("inf"), lse), mask=inside)
            tl.store(p_slc_rows + at * 2 + 1, delta, mask=inside)
        else:
            p_rows = p_cmp_rows if i_branch == 0 else p_swa_rows
            tl.store(p_rows + at_row, tl.where(empty, float("inf"), lse * LOG2E), mask=row < rows)
            tl.store(p_rows + rows + at_row, delta, mask=row < rows)


class BranchRows(NamedTuple):
    """The values that the backward of each branch reads for each query, in addition to q."""

    do: list[Tensor]  # gate times do for the compressed, selected and window branch, (T, Hq, E) each
    cmp: BackwardRows
    slc: Tensor  # (T, Hq, 2) fp32, lse and delta
    swa: BackwardRows


def branch_rows(
    do: Tensor, branches: Branches, gates: Tensor, plan: SelectedPlan, layout: BlockLayout
) -> tuple[BranchRows, Tensor]:
    """Return the input of `mixed_backward`, and the gradient of the gates; `layout` is any layout of these queries."""
    queries, q_heads, dim = do.shape
    batch = batch_of(plan)
    lse = branches.cmp_lse.new_empty(batch, q_heads, 0)
    cmp, swa = empty_rows(lse, layout), empty_rows(lse, layout)
    slc = lse.new_empty(queries, q_heads, 2)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in branches[:3]]
    d_gates = torch.empty_like(gates, memory_format=torch.contiguous_format)
    count = cmp[0].numel()
    _nsa_hopper_bwd_rows_kernel[(-(-count // TILE_ROWS),)](
        do.contiguous(),
        *(x.contiguous() for x in branches[:3]),
        *grads,
        *(x.contiguous() for x in branches[3:]),
        gates.contiguous(),
        d_gates,
        cmp,
        swa,
        slc,
        rows=count,
        seqlen_q=queries // batch,
        padded_q=cmp.shape[3],
        q_heads=q_heads,
        E=dim,
        BLOCK_M=TILE_ROWS,
        num_warps=4,
    )
    return BranchRows(grads, BackwardRows(cmp[0], cmp[1], None), slc, BackwardRows(swa[0], swa[1], None)), d_gates


def batch_of(plan: SelectedPlan) -> int:
    """Return the number of sequences if they have equal lengths and so form a batch; else 1."""
    equal = plan.spans.equal_lengths
    return 1 if equal is None else equal.num_seqs
