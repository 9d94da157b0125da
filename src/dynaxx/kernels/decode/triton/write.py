# SPDX-License-Identifier: Apache-2.0
"""Write keys and values of new tokens into the pages of a cache.

A program writes one head of some tokens. Tokens of a chunk lie side by side in their pages, so it writes whole rows of
memory; engines' own kernels have a program per token and reach a third of the speed for chunks of 8,192 tokens.

Legend: T tokens; Hk kv heads; D head_dim of k, E of v.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.launcher import kernel_launcher

TOKENS = 32  # per program


class TokenStrides(NamedTuple):
    """Strides of (T, Hk, D), in elements."""

    token: int
    head: int


class SlotStrides(NamedTuple):
    """Strides of (pages, page_size, Hk, D), in elements."""

    page: int
    token: int
    head: int


@kernel_launcher
@triton.jit(do_not_specialize=["tokens"])
def _write_pages_kernel(
    p_k,  # (T, Hk, D)
    p_v,  # (T, Hk, E)
    p_slots,  # (T,) int64: page * PAGE + place in the page; negative for padding
    p_k_cache,
    p_v_cache,
    tokens,
    k_strides,
    v_strides,
    k_cache_strides,
    v_cache_strides,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_h = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + o_t, mask=o_t < tokens, other=-1).to(tl.int64)
    page, place = slot // PAGE, slot % PAGE
    o_t = o_t.to(tl.int64)
    o_d, o_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    m_k = (slot >= 0)[:, None] & (o_d < D)[None, :]
    m_v = (slot >= 0)[:, None] & (o_e < E)[None, :]
    b_k = tl.load(p_k + (o_t * k_strides.token + i_h * k_strides.head)[:, None] + o_d[None, :], mask=m_k)
    b_v = tl.load(p_v + (o_t * v_strides.token + i_h * v_strides.head)[:, None] + o_e[None, :], mask=m_v)
    to_k = page * k_cache_strides.page + place * k_cache_strides.token + i_h * k_cache_strides.head
    to_v = page * v_cache_strides.page + place * v_cache_strides.token + i_h * v_cache_strides.head
    tl.store(p_k_cache + to_k[:, None] + o_d[None, :], b_k, mask=m_k)
    tl.store(p_v_cache + to_v[:, None] + o_e[None, :], b_v, mask=m_v)


def write_pages(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Store tokens in their pages.

    Args:
        k: (>= T, Hk, D), last dimension contiguous; tokens past the last slot are padding.
        v: (>= T, Hk, E).
        slots: (T,) int64, page * page_size + place in the page; negative values are padding.
        k_cache: (pages, page_size, Hk, D) in k's dtype, last dimension contiguous.
        v_cache: (pages, page_size, Hk, E) in v's dtype.
    """
    tokens, kv_heads = len(slots), k.shape[1]
    if not tokens or not kv_heads:
        return
    _write_pages_kernel[(-(-tokens // TOKENS), kv_heads)](
        k,
        v,
        slots,
        k_cache,
        v_cache,
        tokens=tokens,
        k_strides=TokenStrides(*k.stride()[:2]),
        v_strides=TokenStrides(*v.stride()[:2]),
        k_cache_strides=SlotStrides(*k_cache.stride()[:3]),
        v_cache_strides=SlotStrides(*v_cache.stride()[:3]),
        PAGE=k_cache.shape[1],
        D=k.shape[2],
        E=v.shape[2],
        BLOCK_D=padded(k.shape[2]),
        BLOCK_E=padded(v.shape[2]),
        BLOCK_T=TOKENS,
        num_warps=4,
    )
