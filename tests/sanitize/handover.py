# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""A kernel that does nothing but hand work to other warps, to see what a tool says of that alone."""

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
    """Run it once, in programs enough to meet."""
    _handover_kernel[(64,)](torch.zeros(2, dtype=torch.int32, device="cuda"), 0, num_warps=4)
