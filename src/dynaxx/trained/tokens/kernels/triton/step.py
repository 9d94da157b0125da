# SPDX-License-Identifier: Apache-2.0
"""A decoding step over chosen tokens on a GPU: `kernels.tokens.contract.TokenDecodeKernels`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.decode.triton.pages import cache_arguments
from dynaxx.kernels.device import gpu_of, padded, power_of_two, processors
from dynaxx.kernels.runtime.arguments import strides_of, unit_stride
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.layout.paging import PagedCache
from dynaxx.trained.tokens.kernels.gpu.config import SMALLEST, WIDE, widths
from dynaxx.trained.tokens.kernels.triton.decode import _token_decode_kernel, _token_merge_kernel

PROGRAMS_PER_PROCESSOR = 2
MAX_PIECES = 64


def attend_tokens(
    q: Tensor,
    cache: PagedCache,
    block_indices: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, like `kernels.tokens.reference.attention`."""
    latent = cache.k_scale is None and shares_memory(cache)
    found: tuple[Tensor, Tensor] = record_or_replay(
        _attend, cache, (q, block_indices, sinks), block_size, scale, softcap, latent
    )
    return found


def _attend(
    cache: PagedCache,
    q: Tensor,
    block_indices: Tensor,
    sinks: Tensor | None,
    block_size: int,
    scale: float,
    softcap: float | None,
    latent: bool,
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, q_heads, dim = q.shape
    dim_v, kv_heads = cache.head_dim_v, cache.kv_heads
    out = q.new_empty(batch, seqlen_q, q_heads, dim_v)
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if cache.k_scale is None:
        q = q.to(torch.promote_types(q.dtype, cache.k.dtype))
    q, chosen = unit_stride(q), block_indices.contiguous()
    select_heads, slots = chosen.shape[2:]
    units = max(select_heads, kv_heads)
    group_size = q_heads // units
    tiles = _tiles(q, cache, units, slots * block_size, latent)
    acc = q.new_empty(batch * seqlen_q, q_heads, tiles.pieces, dim_v, dtype=torch.float32)
    state = q.new_empty(batch * seqlen_q, q_heads, tiles.pieces, 2, dtype=torch.float32)
    (d_a, d_b), (e_a, e_b) = widths(dim), widths(dim_v)
    _token_decode_kernel[(batch * seqlen_q, units, tiles.parts * tiles.pieces)](
        q,
        cache.k,
        cache.v,
        p_acc=acc,
        p_state=state,
        p_chosen=chosen,
        **cache_arguments(cache, state),
        v_strides=cache.strides(cache.v),
        seqlen_q=seqlen_q,
        units=units,
        select_heads=select_heads,
        kv_heads=kv_heads,
        slots=slots,
        group_size=group_size,
        pieces=tiles.pieces,
        scale=scale,
        softcap=softcap or 1.0,
        q_strides=strides_of(q),
        LATENT=latent,
        D_A=d_a,
        D_B=d_b,
        E_A=e_a,
        E_B=e_b,
        GRAIN=block_size,
        PART=tiles.part,
        BLOCK_N=tiles.block_n,
        CAPPED=softcap is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    _token_merge_kernel[(batch * seqlen_q, q_heads)](
        acc,
        state,
        out,
        lse,
        state if sinks is None else sinks.contiguous(),
        seqlen_q=seqlen_q,
        q_heads=q_heads,
        pieces=tiles.pieces,
        E=dim_v,
        BLOCK_E=padded(dim_v),
        BLOCK_P=power_of_two(tiles.pieces),
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )
    return out, lse


class StepTiles(NamedTuple):
    """Sizes of a step: q heads and keys per tile, and the pieces into which each list is cut."""

    part: int  # q heads of a unit that a program processes
    parts: int  # programs per unit and piece
    pieces: int  # pieces of a list
    block_n: int
    num_warps: int
    num_stages: int


def _tiles(q: Tensor, cache: PagedCache, units: int, keys: int, latent: bool) -> StepTiles:
    """Return the sizes for q (batch, seqlen_q, q_heads, head_dim) and lists of `keys` keys, one list per unit."""
    batch, seqlen_q, q_heads, dim = q.shape
    wide, fp32 = max(dim, cache.head_dim_v) > WIDE, q.dtype == torch.float32
    group_size = q_heads // units
    part = max(16, min(16 if fp32 else 64, power_of_two(group_size)))
    parts = -(-group_size // part)
    amd = gpu_of(q.device).vendor == "amd"  # 64 threads per warp: 4 warps have all registers, and few keys fit
    block_n = 16 if wide and fp32 else 64 if (latent and not amd) or (not wide and not fp32) else 32
    row = (sum(widths(dim)) + (0 if latent else sum(widths(cache.head_dim_v)))) * cache.k.dtype.itemsize
    while block_n > SMALLEST and 2 * block_n * row > gpu_of(q.device).shared_memory:
        block_n //= 2
    pieces = PROGRAMS_PER_PROCESSOR * processors(q.device) // (batch * seqlen_q * units * parts)
    pieces = max(1, min(pieces, MAX_PIECES, -(-keys // block_n)))
    stages = 1 if fp32 or cache.k_scale is not None or amd else 4 if cache.is_paged else 3
    return StepTiles(part, parts, pieces, block_n, 8 if wide and not amd else 4, stages)


def shares_memory(cache: PagedCache) -> bool:
    """Return whether a cache's values are the first part of its keys, as in latent attention (MLA)."""
    k, v = cache.k, cache.v
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.dtype == v.dtype
    return same and k.shape[3] > v.shape[3] and v.shape[3] == widths(k.shape[3])[0] == widths(v.shape[3])[0]
