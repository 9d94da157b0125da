# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""A kernel that only hands work to other warps; what a tool reports here is Triton's own."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _write(p_out, at):
    gl.store(p_out + at, 1)


@gluon.jit
def _handover_kernel(p_out, at):
    gl.warp_specialize([
        (_write, (p_out, at)),
        (_write, (p_out, at + 1)),
    ], [4], [64])  # fmt: skip


def hand_over() -> None:
    """Run the kernel once, with enough programs to overlap."""
    _handover_kernel[(64,)](torch.zeros(2, dtype=torch.int32, device="cuda"), 0, num_warps=4)
