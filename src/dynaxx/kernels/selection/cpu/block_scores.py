# SPDX-License-Identifier: Apache-2.0
"""Scores of kv blocks for mean queries, and the choice of the best blocks, by the core."""

from __future__ import annotations

from ctypes import byref, c_int64

import torch
from torch import Tensor

from dynaxx.core.library import active_library
from dynaxx.core.status import raise_for_status
from dynaxx.core.structures import structure
from dynaxx.kernels.runtime.core_threads import num_threads
from dynaxx.layout.host import address, never_traced, on_host

BlockScoreArgs = structure("BlockScoreArgs")


def serves(*tensors: Tensor) -> bool:
    """Return whether the core reads these: plain fp32 tensors on the CPU, outside compiled and exported programs."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or active_library() is None:
        return False
    return all(type(x) is Tensor and _is_plain(x) for x in tensors)


def serves_scores(queries: Tensor, k: Tensor) -> bool:
    """Return whether `block_scores` serves these queries and keys."""
    if not serves(queries, k) or k.stride(-1) != 1:
        return False
    (batch, q_heads, _, head_dim), (k_batch, _, kv_heads, k_head_dim) = queries.shape, k.shape
    return (batch, head_dim) == (k_batch, k_head_dim) and kv_heads > 0 and q_heads % kv_heads == 0


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.layout == torch.strided


@on_host
@never_traced
def block_scores(queries: Tensor, k: Tensor, ends: Tensor, kv_block: int) -> Tensor:
    """Return the log of the sum over each kv block's visible keys of exp(query . key).

    Args:
        queries: (B, Hq, R, D) fp32, one query per row of q blocks, times the softmax scale.
        k: (B, N, Hk, D) fp32 with a contiguous last dimension.
        ends: (R,) int64 number of keys that each row sees, ascending.
        kv_block: tokens per block.

    Returns:
        (B, Hq, R, C) fp32. Blocks of which a row sees no key get -inf.
    """
    library, queries, ends = active_library(), queries.detach().contiguous(), ends.contiguous()
    assert library is not None, "`serves` says whether there is a core"
    (batch, q_heads, rows, head_dim), (_, tokens, kv_heads, _) = queries.shape, k.shape
    best, sums = torch.empty(2, batch, q_heads, rows, -(-tokens // kv_block), dtype=torch.float32)
    args = BlockScoreArgs(
        address(queries, torch.float32, queries.shape),
        address(k, torch.float32, (batch, tokens, kv_heads, head_dim), strided=True),
        address(ends, torch.int64, (rows,)),
        address(best, torch.float32, best.shape),
        address(sums, torch.float32, best.shape),
        (c_int64 * 3)(*k.stride()[:3]),
        batch,
        q_heads,
        kv_heads,
        rows,
        head_dim,
        tokens,
        kv_block,
        num_threads(),
    )
    raise_for_status(library.dynaxx_cpu_block_scores(byref(args)))
    return sums.log_().add_(best)


@on_host
@never_traced
def mark_best(scores: Tensor, counts: Tensor) -> Tensor:
    """Return which scores (..., C) fp32 are among the best counts (...) int64 of their row, without -inf.

    The first of equal scores win. NaN is never chosen.
    """
    library, scores, counts = active_library(), scores.detach().contiguous(), counts.contiguous()
    assert library is not None, "`serves` says whether there is a core"
    marked = torch.zeros(scores.shape, dtype=torch.bool)
    *rows, width = scores.shape
    read = address(scores, torch.float32, scores.shape), counts.numel(), width, address(counts, torch.int64, (*rows,))
    raise_for_status(library.dynaxx_cpu_mark_best(*read, num_threads(), address(marked, torch.bool, scores.shape)))
    return marked
