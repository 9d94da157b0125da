# SPDX-License-Identifier: Apache-2.0
"""The indexer's choice of tokens on Hopper: `kernels.tokens.contract.IndexerKernels` for many queries."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dynaxx.kernels.device import power_of_two, processors
from dynaxx.kernels.primitives.hopper.descriptors import gluon_type
from dynaxx.kernels.runtime.arguments import as_template, nowhere, rebased
from dynaxx.kernels.support.hopper import DTYPES
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.trained.support.hopper import INDEX_HEADS
from dynaxx.trained.tokens.kernels.gpu.plan import query_places
from dynaxx.trained.tokens.kernels.gpu.rounding import to_fp8, to_int8
from dynaxx.trained.tokens.kernels.hopper import best, indexer, indexer_heads
from dynaxx.trained.tokens.kernels.hopper.indexer import _index_hopper_kernel
from dynaxx.trained.tokens.kernels.hopper.indexer_heads import _index_heads_kernel
from dynaxx.trained.tokens.spans import TokenSpans

__all__ = ["index_tokens", "to_fp8", "to_int8"]

PROGRAMS, PROGRAMS_OF_HEADS = 3, 2  # per multiprocessor
MAX_REGISTERS = 168  # per thread, for as many programs
SAMPLED_KEYS = 2048  # keys in the sample that gives a tile its first thresholds


def index_tokens(
    q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, spans: TokenSpans, slots: int
) -> Tensor:
    """Return the best tokens of each query, (T, 1, slots) int32, ascending, -1 behind."""
    chosen = torch.empty(q.shape[0], 1, slots, dtype=torch.int32, device=q.device)
    if not (chosen.numel() and any(d > c for c, d in pairwise(spans.ends_k))):
        return chosen.fill_(-1)
    keys, few = best.KEYS.value, q.shape[1] <= INDEX_HEADS
    per_tile = indexer.ROWS.value if few else indexer_heads.ROWS.value // q.shape[1]
    tiles, position, first_row = query_places(spans, per_tile, q.device)
    capacity = power_of_two(max(2 * slots, slots + best.SPARE.value * keys))
    programs = min(len(tiles), (PROGRAMS if few else PROGRAMS_OF_HEADS) * processors(q.device))
    if q.dtype not in DTYPES and (few or q.dtype != torch.float8_e4m3fn):
        q, k = q.bfloat16(), k.bfloat16()  # exact: bf16 holds whole numbers up to 256, and e4m3
    if few:
        k, k_scale, first_row = keys_in_threads(k, k_scale, spans)
    k = k.contiguous()
    if k.data_ptr() % 16:
        k = k.clone()
    shared: dict[str, Any] = {
        "p_q": q.contiguous(),
        "k_desc": rebased(_rows(k.shape, k.dtype, keys), k),
        "p_weights": weights.float().contiguous(),
        "p_k_scale": None if k_scale is None else k_scale.float().contiguous(),
        "p_tiles": tiles,
        "p_position": position,
        "p_first_row": first_row,
        "p_next": chosen.new_zeros(1),
        "p_lists": torch.empty(programs, per_tile, capacity, dtype=torch.int64, device=q.device),
        "p_chosen": chosen,
        "tiles": len(tiles),
        "slots": slots,
        "HEADS": q.shape[1],
        "D": q.shape[2],
        "CAPACITY": capacity,
        "SAMPLES": min(SAMPLED_KEYS, capacity) // keys,
        "num_warps": best.WARPS,
    }
    if few:
        _index_hopper_kernel[(programs,)](**shared, maxnreg=MAX_REGISTERS)
    else:
        _index_heads_kernel[(programs,)](**shared, STAGES=4 if q.itemsize == 1 else 2)
    return chosen


def keys_in_threads(k: Tensor, k_scale: Tensor | None, spans: TokenSpans) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return keys and their scales in the order of `indexer.keys_in_threads`, and the first of them for each query.

    Each sequence starts at a multiple of a tile's keys, and is filled up with any keys.
    """
    first_row, order = _order_in_threads(spans, k.device)
    if len(spans.ends_k) == 2:
        return _by_columns(k), k_scale if k_scale is None else _by_columns(k_scale), first_row
    return k[order], k_scale if k_scale is None else k_scale[order], first_row


@LayoutCache
@on_host
def _order_in_threads(spans: TokenSpans, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each query the first row of its sequence, and the keys in the rows; none if all are one sequence."""
    starts, size = [], 0
    for (a, b), (c, d) in zip(pairwise(spans.ends_q), pairwise(spans.ends_k), strict=True):
        starts.append(torch.full((b - a,), size, dtype=torch.int32))
        size += -(-(d - c) // best.KEYS.value) * best.KEYS.value
    ends = spans.ends_k if len(starts) > 1 else (0, 0)
    order = torch.cat([_by_columns(torch.arange(c, d)) for c, d in pairwise(ends)])
    with torch.inference_mode(False):  # cached tensors must also be usable in training
        return torch.cat(starts).to(device, non_blocking=True), order.to(device, non_blocking=True)


def _by_columns(rows: Tensor) -> Tensor:
    """Return the rows of a sequence in tiles, each with key 16 t + 2 j + e in place 8 j + 2 t + e."""
    keys = best.KEYS.value
    filled = torch.cat([rows, rows[:1].expand(-len(rows) % keys, *rows.shape[1:])])
    return filled.view(len(filled) // keys, 4, keys // 8, 2, *rows.shape[1:]).transpose(1, 2).reshape(filled.shape)


@lru_cache(maxsize=256)
def _rows(shape: torch.Size, dtype: torch.dtype, rows: int) -> Any:
    block = [rows, shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gluon_type(dtype))
    return as_template(TensorDescriptor(nowhere(dtype), list(shape), [shape[1], 1], block, layout))
