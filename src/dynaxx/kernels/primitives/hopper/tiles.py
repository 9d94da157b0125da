# SPDX-License-Identifier: Apache-2.0
"""Tiles of keys or values in shared memory that TMA loads in parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.compat import reinterpret


@gluon.jit
def tile_of_parts(buffers, stage, ROWS: gl.constexpr, D: gl.constexpr):
    """Return one stage's keys or values as one tile [ROWS, D], composed of parts of 64 columns, as wgmma requires."""
    layout: gl.constexpr = gl.NVMMASharedLayout(buffers.layout.swizzle_byte_width, buffers.layout.element_bitwidth, 2)
    stages: gl.constexpr = buffers.shape[0] * buffers.shape[3] * buffers.shape[4] // (ROWS * D)
    return reinterpret(buffers, buffers.dtype, [stages, ROWS, D], layout).index(stage)
