# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Block scores at the grain of tiles, fused: a softmax over key tiles for each query tile, summed to blocks.

A program takes TILE_M query tiles of one head through the key tiles twice, once for the row's maximum and sum and once
for its shares, so nothing of (query tiles x key tiles) is stored.

Legend: T tiles of keys, M tiles of queries, E width of a tile's vector, C kv blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.light import light_launch
from dynaxx.layout import BlockGrid


@triton.jit
def _tile_logits(
    p_q, p_k, o_m, o_t, tiles_q, tiles_k, seqlen_k, first_tile, offset,
    Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, CAUSAL: tl.constexpr, TILE_M: tl.constexpr, TILE_T: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """[TILE_M, TILE_T] logits of query tiles o_m of this call with key tiles o_t; -inf where hidden."""
    logits = tl.zeros([TILE_M, TILE_T], tl.float32)
    for first in range(0, E, BLOCK_E):
        o_e = first + tl.arange(0, BLOCK_E)
        m_e = o_e < E
        b_q = tl.load(p_q + o_m[:, None] * E + o_e[None, :], mask=(o_m < tiles_q)[:, None] & m_e[None, :], other=0.0)
        b_k = tl.load(p_k + o_t[:, None] * E + o_e[None, :], mask=(o_t < tiles_k)[:, None] & m_e[None, :], other=0.0)
        logits = tl.dot(b_q, tl.trans(b_k), logits)
    start = o_t * K_SIZE
    keys = tl.minimum(tl.maximum(seqlen_k - start, 1), K_SIZE).to(tl.float32)
    logits += tl.log(keys / K_SIZE)[None, :]
    visible = (o_m < tiles_q)[:, None] & (o_t < tiles_k)[None, :]
    if CAUSAL:
        end = (first_tile + o_m + 1) * Q_SIZE - 1 + offset
        visible = visible & (start[None, :] <= end[:, None])
    return tl.where(visible, logits, float("-inf"))


@light_launch
@triton.jit(do_not_specialize=["tiles_q", "tiles_k", "seqlen_k", "first_tile", "offset", "rows", "kv_blocks"])
def _tile_mass_kernel(
    p_q,  # (B, Hq, M, E) contiguous
    p_k,  # (B, Hk, T, E) contiguous
    p_mass,  # (B, Hq, R, C) fp32 contiguous, zeros
    tiles_q,
    tiles_k,
    seqlen_k,
    first_tile,
    offset,
    rows,
    kv_blocks,
    group_size,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    Q_PARTS: tl.constexpr,
    K_PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_T: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    i_bh = tl.program_id(1).to(tl.int64)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first, under a causal mask
    o_m = i_tile * TILE_M + tl.arange(0, TILE_M)
    p_q += i_bh * tiles_q * E
    p_k += i_bh // group_size * tiles_k * E
    stop = tiles_k
    if CAUSAL:
        last = (first_tile + i_tile * TILE_M + TILE_M) * Q_SIZE - 1 + offset
        stop = tl.where(last < 0, 0, tl.minimum(last // K_SIZE + 1, tiles_k))
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    for first in range(0, stop, TILE_T):
        logits = _tile_logits(
            p_q, p_k, o_m, first + tl.arange(0, TILE_T), tiles_q, tiles_k, seqlen_k, first_tile, offset,
            Q_SIZE, K_SIZE, CAUSAL, TILE_M, TILE_T, E, BLOCK_E,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp(row_max - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
        row_max = new_max
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    o_row = i_tile * (TILE_M // Q_PARTS) + tl.arange(0, TILE_M // Q_PARTS)
    for first in range(0, stop, TILE_T):
        logits = _tile_logits(
            p_q, p_k, o_m, first + tl.arange(0, TILE_T), tiles_q, tiles_k, seqlen_k, first_tile, offset,
            Q_SIZE, K_SIZE, CAUSAL, TILE_M, TILE_T, E, BLOCK_E,
        )  # fmt: skip
        shares = tl.exp(logits - shift[:, None]) / row_sum[:, None]
        by_block = tl.sum(tl.reshape(shares, [TILE_M, TILE_T // K_PARTS, K_PARTS]), 2)
        mass = tl.sum(tl.reshape(by_block, [TILE_M // Q_PARTS, Q_PARTS, TILE_T // K_PARTS]), 1)
        o_c = first // K_PARTS + tl.arange(0, TILE_T // K_PARTS)
        inside = (o_row < rows)[:, None] & (o_c < kv_blocks)[None, :]
        tl.store(p_mass + (i_bh * rows + o_row[:, None]) * kv_blocks + o_c[None, :], mass, mask=inside)


def tile_mass(
    queries: Tensor, keys: Tensor, first_tile: int, rows: int, grid: BlockGrid, sizes: tuple[int, int], panel: int = 1
) -> Tensor:
    """Mass of each kv block for some rows of q blocks.

    Args:
        queries: (B, Hq, M, E), vectors of the rows' query tiles, from tile `first_tile`, times the softmax scale.
        keys: (B, Hk, T, E), vectors of all key tiles, in the same dtype.
        rows: panels of q blocks that the query tiles make up.
        sizes: tokens per tile of queries and of keys; they divide the blocks.
        panel: q blocks per panel.

    Returns:
        (B, Hq, rows, C) fp32: each query tile's shares sum to 1 or 0.
    """
    (batch, q_heads, tiles_q, width), tiles_k = queries.shape, keys.shape[2]
    mass = torch.zeros(batch, q_heads, rows, grid.kv_blocks, device=queries.device)
    q_parts, k_parts = panel * grid.block_size[0] // sizes[0], grid.block_size[1] // sizes[1]
    tile_m, tile_t = max(64, q_parts), max(64, k_parts)
    _tile_mass_kernel[(triton.cdiv(tiles_q, tile_m), batch * q_heads)](
        queries.contiguous(),
        keys.contiguous(),
        mass,
        tiles_q=tiles_q,
        tiles_k=tiles_k,
        seqlen_k=grid.seqlen_k,
        first_tile=first_tile,
        offset=grid.offset,
        rows=rows,
        kv_blocks=grid.kv_blocks,
        group_size=q_heads // keys.shape[1],
        Q_SIZE=sizes[0],
        K_SIZE=sizes[1],
        Q_PARTS=q_parts,
        K_PARTS=k_parts,
        CAUSAL=grid.causal,
        TILE_M=tile_m,
        TILE_T=tile_t,
        E=width,
        BLOCK_E=min(64, triton.next_power_of_2(max(16, width))),
        num_warps=4 if tile_m * tile_t <= 64 * 64 else 8,
    )
    return mass
