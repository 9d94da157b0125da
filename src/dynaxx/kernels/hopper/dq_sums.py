# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""dq summed over programs: fp32 in global memory, by reductions of 16 bytes, in an order that suits the registers.

64 queries of one head are a tile of 64 * head_dim sums: for each of the consumers its share of the columns, and there
the four that a thread holds of every eight columns side by side, thread after thread.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from dynaxx.kernels.hopper.forward_consume import ROWS
from dynaxx.kernels.hopper.launch import gluon_rows


@gluon.jit
def _places(layout: gl.constexpr, SHARE: gl.constexpr, EACH: gl.constexpr):
    """Where the sums of a consumer's [ROWS, SHARE] lie: each of them, or where its four begin."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, SHARE, gl.SliceLayout(0, layout))
    by_row = r % 8 * 16 + r // 16 * 128
    by_column = c % 8 // 2 * 4 + c // 8 * 512
    if EACH:
        by_row += r // 8 % 2 * 2
        by_column += c % 2
    return by_row[:, None] + by_column[None, :]


@gluon.jit
def add_dq(p_share, dq):
    """Add [ROWS, SHARE] in the layout of wgmma's results to a consumer's share of a tile."""
    layout: gl.constexpr = dq.type.layout
    p = (p_share + _places(layout, dq.shape[1], False)).to(gl.uint64, bitcast=True)
    gl.inline_asm_elementwise(
        """red.global.add.v4.f32 [$4], {$8, $9, $10, $11};
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;""",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [p, dq],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit(do_not_specialize=["padded_q", "q_heads"])
def _sparse_attention_hopper_bwd_sums_kernel(dq_desc, p_sums, padded_q, q_heads, scale, CONSUMERS: gl.constexpr):
    """dq = scale * sums, one tile."""
    D: gl.constexpr = dq_desc.block_type.shape[3]
    SHARE: gl.constexpr = D // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHARE, 16])
    i_tile = gl.program_id(0)
    tiles = padded_q // ROWS
    head = i_tile // tiles
    p_tile = p_sums + i_tile.to(gl.int64) * (ROWS * D)
    buffer = gl.allocate_shared_memory(dq_desc.dtype, [1, 1, ROWS, D], dq_desc.layout)
    for u in gl.static_range(CONSUMERS):
        sums = gl.load(p_tile + u * (ROWS * SHARE) + _places(layout, SHARE, True))
        buffer.reshape([ROWS, D]).slice(u * SHARE, SHARE, dim=1).store((sums * scale).to(dq_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, [head // q_heads, head % q_heads, i_tile % tiles * ROWS, 0], buffer)
    tma.store_wait(0)


def finish_dq(sums: Tensor, q: Tensor, tiles: int, scale: float) -> Tensor:
    """dq, contiguous (B, N, Hq, D), of the sums of two consumers over so many tiles."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    batch, _, q_heads, _ = q.shape
    _sparse_attention_hopper_bwd_sums_kernel[(tiles,)](
        gluon_rows(dq, 64), sums, padded_q=tiles // (batch * q_heads) * 64, q_heads=q_heads, scale=scale, CONSUMERS=2,
        num_warps=4,
    )  # fmt: skip
    return dq
