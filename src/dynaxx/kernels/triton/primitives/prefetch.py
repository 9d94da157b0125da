# SPDX-License-Identifier: Apache-2.0
"""Loads by TMA that start ahead of their use."""

import triton
import triton.language as tl

from dynaxx.kernels.gpu.prefetch import ahead


@triton.jit
def load_prefetched(head, start, TILE: tl.constexpr, BLOCK_DIM: tl.constexpr, TURNS: tl.constexpr):
    """Load [TILE, BLOCK_DIM] rows of `HeadRows`, from row `start`, by TMA, started TURNS iterations ahead."""
    rows = ahead(head.source.load([head.i_b.to(tl.int32), head.i_h.to(tl.int32), start.to(tl.int32), 0]), TURNS)
    return rows.reshape(TILE, BLOCK_DIM)
