# SPDX-License-Identifier: Apache-2.0
"""Code that the Hopper kernels of selected attention share: tiles by TMA, blocks of keys, resources of a program."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.compat import reinterpret, tma_load
from dynaxx.kernels.runtime.arguments import as_template, nowhere, rebased

SHARED_ROWS = 896  # rows of 256 bytes that fit into shared memory
# The state of a call, int32, initially 0: for each of two launches, the number of tiles that programs took in addition
# to their first one; whether any weight of the first launch left its range; and the same for each tile.
TURN, ANY_LOST, LOST = gl.constexpr(0), gl.constexpr(2), gl.constexpr(3)


@gluon.jit
def feed_blocks(
    k_desc, v_desc, k_buffers, v_buffers, full, empty, p_starts, count, before, i_hk, STAGES: gl.constexpr
):  # fmt: skip
    """Load the keys and values of each block of a union in order, after `before` other blocks."""
    for i_block in range(count):
        at = [i_hk, gl.load(p_starts + i_block), 0]
        feed_block(k_desc, v_desc, k_buffers, v_buffers, full, empty, before + i_block, at, STAGES)


@gluon.jit
def feed_block(k_desc, v_desc, k_buffers, v_buffers, full, empty, i_block, at, STAGES: gl.constexpr):
    """Load the keys and values of a program's `i_block`-th block."""
    stage = i_block % STAGES
    mbarrier.wait(empty.index(stage), ((i_block // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, at, full.index(stage), k_buffers.index(stage))
    tma_load(v_desc, at, full.index(stage), v_buffers.index(stage))


@gluon.jit
def row_tile(buffers, q_desc, stage):
    """Return a block's buffer, reinterpreted as the buffer of a consumer's rows."""
    tile: gl.constexpr = q_desc.block_type.shape
    PER_BLOCK: gl.constexpr = buffers.shape[2] // ROWS
    tiles = reinterpret(buffers, q_desc.dtype, [buffers.shape[0] * PER_BLOCK, tile[0], tile[1], tile[2]], q_desc.layout)
    return tiles.index(stage * PER_BLOCK)


@gluon.constexpr_function
def product_layout(columns):
    """Return the register layout of a product with 64 rows, computed by one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def places(layout: gl.constexpr, GROUP: gl.constexpr):
    """Return the query position and the head within the group of each row of a consumer's scores, and the columns."""
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, layout.instr_shape[1], gl.SliceLayout(0, layout))
    return o_row // GROUP, o_row % GROUP, columns


@gluon.jit
def sequence_start(p_first_block, p_block_start, t, inside):
    """Return the first key of a query's sequence."""
    return gl.load(p_block_start + gl.load(p_first_block + t, mask=inside, other=0))


@gluon.jit
def window_of(p_last_key, p_first_block, p_block_start, first_t, positions, queries, window, KV_BLOCK: gl.constexpr):
    """Return the first key of a tile's window, and how many blocks the window spans from there."""
    start = sequence_start(p_first_block, p_block_start, first_t, True)
    begin = gl.maximum(start, gl.load(p_last_key + first_t) - window + 1)
    last = gl.load(p_last_key + gl.minimum(first_t + positions, queries) - 1)
    return begin, gl.maximum(last - begin + KV_BLOCK, 0) // KV_BLOCK


def descriptor(x: Tensor, block: tuple[int, int, int]) -> TensorDescriptor:
    """Return a TMA descriptor of a three-dimensional tensor with a dense last dimension."""
    return rebased(_descriptor(x.shape, x.stride(), x.dtype, block), x)


@lru_cache(maxsize=4096)
def _descriptor(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, int, int]
) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    steps = [strides[i] if shape[i] > 1 else shape[2] for i in range(2)]  # the stride of a single entry is arbitrary
    return as_template(TensorDescriptor(nowhere(dtype), list(shape), [*steps, 1], list(block), layout))


def stages(consumers: int, tiles: int, dim: int, kv_block: int) -> int:
    """Return how many blocks of keys and values, at most 4, fit next to `tiles` tiles of 64 rows per consumer."""
    return min(4, (SHARED_ROWS - consumers * tiles * 64 * dim // 128) // (2 * kv_block * dim // 128))


def registers(consumers: int) -> dict[str, int]:
    """Return how the warps of a program share the register file."""
    consumer, average = (160, 128) if consumers == 3 else (240, 168)
    return {"CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": 24, "num_warps": 4, "maxnreg": average}
