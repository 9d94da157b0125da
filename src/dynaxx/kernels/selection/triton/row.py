# SPDX-License-Identifier: Apache-2.0
"""A row of blocks in the selection kernels: its mask ids under causality and a pattern, and arguments for the grid.

Legend: C kv blocks.
"""

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.layout import BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.masks import causal_mask_id_terms

FULL = tl.constexpr(-1)
EMPTY = tl.constexpr(-2)
GRID_SIZES = ["seqlen_q", "seqlen_k", "q_blocks", "kv_blocks", "q_block", "kv_block", "first_distance", "shift"]


class StaticEntries(NamedTuple):
    """The entries of a pattern by row, and a table of masks that combines the pattern's with the causal masks."""

    layout: BlockLayout | None  # layout of the pattern, on the device
    mask_ids: Tensor  # (nnz,) int32: mask ids of its entries, see `masks`
    same_as_causal: Tensor  # (len(masks) | 1,) int32: the causal mask equal to each mask, else EMPTY
    masks: ElementMasks  # the causal masks, then the pattern's


@triton.jit
def causal_mask_id(distance, first, shift, q_block, kv_block, CAUSAL: tl.constexpr):
    """Return `layout.masks.causal_mask_ids` of blocks whose first query is `distance` after their first key."""
    if CAUSAL:
        # Shifting divides by the step, a power of two. The result is negative only if nothing is visible.
        mask_id = (distance - first) >> shift
        mask_id = tl.where(distance >= kv_block - 1, FULL, mask_id)
        mask_id = tl.where(distance <= -q_block, EMPTY, mask_id)
    else:
        mask_id = distance * 0 + FULL
    return mask_id


@triton.jit
def static_row(
    p_indptr, p_indices, p_mask_ids, p_same, i_row, o_c, row_distance, first, shift, q_block, kv_block,
    HAS_STATIC: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return the pattern's mask id for each block of a row [C], and whether it shows all that causality allows."""
    own = o_c * 0 + EMPTY * 2  # twice the mask id, plus one if the pattern shows all that causality allows
    if HAS_STATIC:
        for entry in range(tl.load(p_indptr + i_row), tl.load(p_indptr + i_row + 1)):
            block = tl.load(p_indices + entry)
            mask_id = tl.load(p_mask_ids + entry)
            same = tl.load(p_same + tl.maximum(mask_id, 0))
            causal = causal_mask_id(row_distance - block * kv_block, first, shift, q_block, kv_block, CAUSAL)
            covers = (mask_id == FULL) | ((mask_id >= 0) & (same == causal))
            own = tl.where(o_c == block, mask_id * 2 + covers.to(tl.int32), own)
    return own >> 1, (own & 1) != 0


def columns(kv_blocks: int) -> int:
    """Return BLOCK_C for a row."""
    return max(32, 1 << (kv_blocks - 1).bit_length())


def warps(block_c: int) -> int:
    """Return the warps for a row; 131k tokens in 1,024 blocks take 194 us on an H200 with four, 237 us with one."""
    return min(16, max(1, block_c // 256))


def static_arguments(static: StaticEntries, anything: Tensor) -> tuple[Tensor, ...]:
    """Return the first four kernel arguments for a pattern; `anything` replaces missing tensors."""
    if static.layout is None:
        return anything, anything, anything, static.same_as_causal
    return static.layout.kv_indptr, static.layout.kv_indices, static.mask_ids, static.same_as_causal


@lru_cache(maxsize=64)
def grid_arguments(grid: BlockGrid) -> dict[str, int | bool]:
    """Return the grid under the kernels' parameter names."""
    first, step = causal_mask_id_terms(grid)
    q_block, kv_block = grid.block_size
    return {
        "seqlen_q": grid.seqlen_q,
        "seqlen_k": grid.seqlen_k,
        "q_blocks": grid.q_blocks,
        "kv_blocks": grid.kv_blocks,
        "q_block": q_block,
        "kv_block": kv_block,
        "first_distance": first,
        "shift": step.bit_length() - 1,
        "CAUSAL": grid.causal,
    }
