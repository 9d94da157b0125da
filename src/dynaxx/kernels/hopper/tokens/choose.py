# SPDX-License-Identifier: Apache-2.0
"""The indexer's choice of tokens on Hopper: `kernels.contract.IndexerKernels` for many queries."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dynaxx.kernels.gpu.device import power_of_two, processors
from dynaxx.kernels.gpu.runtime.arguments import as_template, nowhere, rebased
from dynaxx.kernels.gpu.tokens.plan import query_tiles
from dynaxx.kernels.hopper.primitives.descriptors import gluon_type
from dynaxx.kernels.hopper.support import INDEX_HEADS
from dynaxx.kernels.hopper.tokens import indexer, indexer_heads
from dynaxx.kernels.hopper.tokens.indexer import _index_hopper_kernel
from dynaxx.kernels.hopper.tokens.indexer_heads import _index_heads_kernel
from dynaxx.layout.tokens import TokenSpans

PROGRAMS, PROGRAMS_OF_HEADS = 3, 2  # per multiprocessor
MOST_REGISTERS = 168  # per thread, for as many programs
SAMPLED_KEYS = 4096  # that a tile's first thresholds are taken from


def index_tokens(
    q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, spans: TokenSpans, slots: int
) -> Tensor:
    """Return the best tokens of each query, (T, 1, slots) int32, ascending, -1 behind."""
    chosen = torch.empty(q.shape[0], 1, slots, dtype=torch.int32, device=q.device)
    if not (chosen.numel() and any(d > c for c, d in pairwise(spans.ends_k))):
        return chosen.fill_(-1)
    keys, few = indexer.KEYS.value, q.shape[1] <= INDEX_HEADS
    per_tile = indexer.ROWS.value if few else indexer_heads.ROWS.value // q.shape[1]
    tiles = query_tiles(spans, per_tile)
    capacity = power_of_two(max(2 * slots, slots + 4 * keys))
    programs = min(len(tiles), (PROGRAMS if few else PROGRAMS_OF_HEADS) * processors(q.device))
    place = lambda x: x.to(torch.int32).to(q.device, non_blocking=True)
    k = k.contiguous()
    if k.data_ptr() % 16:
        k = k.clone()
    weights = weights.float().contiguous()
    shared: dict[str, Any] = {
        "p_q": q.contiguous(),
        "k_desc": rebased(_rows(k.shape, k.dtype, keys), k),
        "p_weights": weights,
        "p_tiles": place(tiles),
        "p_position": place(spans.position),
        "p_first_key": place(spans.first_key),
        "p_lists": torch.empty(programs, per_tile, capacity, dtype=torch.int64, device=q.device),
        "p_chosen": chosen,
        "tiles": len(tiles),
        "slots": slots,
        "HEADS": q.shape[1],
        "D": q.shape[2],
        "CAPACITY": capacity,
        "SAMPLES": min(SAMPLED_KEYS, capacity) // keys,
    }
    if few:
        _index_hopper_kernel[(programs,)](**shared, num_warps=indexer.WARPS, maxnreg=MOST_REGISTERS)
    else:
        _index_heads_kernel[(programs,)](
            **shared,
            p_k_scale=weights if k_scale is None else k_scale.float().contiguous(),
            SCALED=k_scale is not None,
            STAGES=4 if q.itemsize == 1 else 2,
            num_warps=indexer_heads.WARPS,
        )
    return chosen


@lru_cache(maxsize=256)
def _rows(shape: torch.Size, dtype: torch.dtype, rows: int) -> Any:
    block = [rows, shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gluon_type(dtype))
    return as_template(TensorDescriptor(nowhere(dtype), list(shape), [shape[1], 1], block, layout))
