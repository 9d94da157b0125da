# SPDX-License-Identifier: Apache-2.0
"""The gated sum of the three branches and its gradients, each in one pass over memory.

Legend: R rows (t, q head); E head_dim of v. Branches and result are (R, E) contiguous, gates (R, 3) contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.launcher import kernel_launcher

ROWS = 32


@triton.jit
def _tile(p_x, row, rows, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Load [ROWS, BLOCK_E] as fp32; return it with its offsets and its mask."""
    o_e = tl.arange(0, BLOCK_E)
    offsets = row.to(tl.int64)[:, None] * E + o_e[None, :]
    mask = (row < rows)[:, None] & (o_e < E)[None, :]
    return tl.load(p_x + offsets, mask=mask, other=0.0).to(tl.float32), offsets, mask


@kernel_launcher
@triton.jit(do_not_specialize=["rows"])
def _gated_sum_fwd_kernel(
    p_cmp, p_slc, p_swa, p_gates, p_out, rows, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for i_branch in tl.static_range(3):
        if i_branch == 0:
            p_branch = p_cmp
        elif i_branch == 1:
            p_branch = p_slc
        else:
            p_branch = p_swa
        b_x, offsets, mask = _tile(p_branch, row, rows, E, BLOCK_E)
        gate = tl.load(p_gates + row.to(tl.int64) * 3 + i_branch, mask=row < rows, other=0.0).to(tl.float32)
        acc += gate[:, None] * b_x
    tl.store(p_out + offsets, acc.to(p_out.dtype.element_ty), mask=mask)


@kernel_launcher
@triton.jit(do_not_specialize=["rows"])
def _gated_sum_bwd_kernel(
    p_do, p_cmp, p_slc, p_swa, p_gates, p_dcmp, p_dslc, p_dswa, p_dgates,
    rows, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_do, offsets, mask = _tile(p_do, row, rows, E, BLOCK_E)
    for i_branch in tl.static_range(3):
        if i_branch == 0:
            p_branch, p_grad = p_cmp, p_dcmp
        elif i_branch == 1:
            p_branch, p_grad = p_slc, p_dslc
        else:
            p_branch, p_grad = p_swa, p_dswa
        at = row.to(tl.int64) * 3 + i_branch
        gate = tl.load(p_gates + at, mask=row < rows, other=0.0).to(tl.float32)
        tl.store(p_grad + offsets, (gate[:, None] * b_do).to(p_grad.dtype.element_ty), mask=mask)
        b_x = tl.load(p_branch + offsets, mask=mask, other=0.0).to(tl.float32)
        d_gate = tl.sum(b_do * b_x, 1)
        tl.store(p_dgates + at, d_gate.to(p_dgates.dtype.element_ty), mask=row < rows)


def gated_sum_forward(outs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Return the gated sum (T, Hq, E), like `kernels.nsa.reference.gated_sum`."""
    branches, gates = [x.contiguous() for x in outs], gates.contiguous()
    out = torch.empty_like(branches[0])
    rows, dim = gates.numel() // 3, out.shape[-1]
    if rows:
        _gated_sum_fwd_kernel[(-(-rows // ROWS),)](
            *branches, gates, out, rows=rows, E=dim, BLOCK_E=padded(dim), ROWS=ROWS, num_warps=4
        )
    return out


def gated_sum_backward(
    do: Tensor, outs: tuple[Tensor, Tensor, Tensor], gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the three branches and of the gates."""
    do, branches, gates = do.contiguous(), [x.contiguous() for x in outs], gates.contiguous()
    grads, d_gates = [torch.empty_like(x) for x in branches], torch.empty_like(gates)
    rows, dim = gates.numel() // 3, do.shape[-1]
    if rows:
        _gated_sum_bwd_kernel[(-(-rows // ROWS),)](
            do, *branches, gates, *grads, d_gates, rows=rows, E=dim, BLOCK_E=padded(dim), ROWS=ROWS, num_warps=4
        )
    return grads[0], grads[1], grads[2], d_gates
