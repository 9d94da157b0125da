# SPDX-License-Identifier: Apache-2.0
"""The best kv blocks of each row of q blocks by the attention of mean queries, and their lists, by the core."""

from __future__ import annotations

from ctypes import byref, c_int64

import torch
from torch import Tensor

from dynaxx.core.library import active_library
from dynaxx.core.structures import raise_for_status, structure
from dynaxx.kernels.runtime.core_threads import num_threads
from dynaxx.layout.grid import BlockGrid
from dynaxx.layout.host import address, on_host
from dynaxx.layout.masks import causal_mask_id_terms

ALL = 2**31 - 1  # count of a row that takes every optional block
MAX_TILES = 16  # tiles of a q block, as many as queries in a panel of the core
BestBlocksArgs = structure("BestBlocksArgs")
ListBlocksArgs = structure("ListBlocksArgs")


def serves(*tensors: Tensor) -> bool:
    """Return whether the core reads these: plain fp32 tensors on the CPU, outside compiled and exported programs."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or active_library() is None:
        return False
    return all(type(x) is Tensor and _is_plain(x) for x in tensors)


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.layout == torch.strided


@on_host
def best_blocks(
    q: Tensor,
    k: Tensor,
    counts: Tensor,
    optional: Tensor,
    grid: BlockGrid,
    tile: int,
    scale: float,
    together: bool = False,
) -> Tensor:
    """Return the bits of the best blocks of each row, by the summed masses of its tiles' mean queries.

    Args:
        q: (B, seqlen_q, Hq, D) fp32 with a contiguous last dimension.
        k: (B, seqlen_k, Hk, D), the same.
        counts: (Hq, R) int32 number of blocks that each row takes; `ALL` takes every optional one, scored or not.
        optional: (R, W) int32 bits of the blocks among which a row chooses, W = ceil(C / 32).
        grid: lengths and block sizes.
        tile: tokens per mean query, a divisor of the q block into at most `MAX_TILES`.
        scale: softmax scale times the sharpness, in powers of two: times log2(e).
        together: whether the q heads of a kv head rank blocks by the sum of their masses, each relative to its best.

    Returns:
        (B, Hq, R, W) int32. Blocks without any mass are chosen by `ALL` alone, and of equal masses the first blocks.
    """
    library = active_library()
    assert library is not None, "`serves` says whether there is a core"
    (batch, _, q_heads, head_dim), kv_heads = q.shape, k.shape[2]
    chosen = torch.empty(batch, q_heads, *optional.shape, dtype=torch.int32)
    args = BestBlocksArgs(
        address(q, torch.float32, (batch, grid.seqlen_q, q_heads, head_dim), strided=True),
        address(k, torch.float32, (batch, grid.seqlen_k, kv_heads, head_dim), strided=True),
        address(counts, torch.int32, (q_heads, grid.q_blocks)),
        address(optional, torch.int32, (grid.q_blocks, -(-grid.kv_blocks // 32))),
        address(chosen, torch.int32, chosen.shape),
        (c_int64 * 3)(*q.stride()[:3]),
        (c_int64 * 3)(*k.stride()[:3]),
        batch,
        grid.seqlen_q,
        grid.seqlen_k,
        q_heads,
        kv_heads,
        head_dim,
        *grid.block_size,
        tile,
        grid.causal,
        together,
        scale,
        num_threads(),
    )
    raise_for_status(library.dynaxx_cpu_best_blocks(byref(args)))
    return chosen


@on_host
def listed_blocks(
    chosen: Tensor, pattern: tuple[Tensor, Tensor, Tensor] | None, grid: BlockGrid
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a layout, `kv_indptr` to `kv_masks`, of a pattern's blocks and of chosen ones.

    Args:
        chosen: (B, Hq, R, W) int32 bits, without blocks that the causal diagonal hides.
        pattern: the blocks of a pattern, the same for all heads: offsets (R + 1,), indices and mask ids (n,), all
            int32; where a block is also chosen, its mask id is the causal one.
        grid: lengths and block sizes.
    """
    library = active_library()
    assert library is not None, "`serves` says whether there is a core"
    batch, heads, rows, _ = chosen.shape
    indptr = torch.empty(batch, heads, rows + 1, dtype=torch.int32)
    num_partial = torch.empty(batch, heads, rows, dtype=torch.int32)
    none = (None, None, None)
    args = ListBlocksArgs(
        address(chosen, torch.int32, (batch, heads, grid.q_blocks, -(-grid.kv_blocks // 32))),
        *(none if pattern is None else (address(x, torch.int32, x.shape) for x in pattern)),
        address(indptr, torch.int32, indptr.shape),
        address(num_partial, torch.int32, num_partial.shape),
        None,
        None,
        batch * heads,
        rows,
        grid.kv_blocks,
        0,
        grid.causal,
        *grid.block_size,
        grid.offset,
        *causal_mask_id_terms(grid),
    )
    raise_for_status(library.dynaxx_cpu_list_blocks(byref(args), num_threads()))
    indices, mask_ids = torch.empty(2, int(indptr[-1, -1, -1]) if indptr.numel() else 0, dtype=torch.int32)
    if indices.numel():
        args.indices, args.mask_ids = (address(x, torch.int32, indices.shape) for x in (indices, mask_ids))
        args.capacity = indices.numel()
        raise_for_status(library.dynaxx_cpu_list_blocks(byref(args), num_threads()))
    return indptr, num_partial, indices, mask_ids
