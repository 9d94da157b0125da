# SPDX-License-Identifier: Apache-2.0
"""The indexer's choice of tokens on a GPU: `kernels.tokens.contract.IndexerKernels`.

Many queries stream (`indexer.py`). Few queries, as in decoding, and long lists have their scores sorted instead, at
most `SCORE_BYTES` of them at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.device import gpu_of, padded, power_of_two, processors
from dynaxx.trained.tokens.kernels.gpu.plan import query_places, query_tiles
from dynaxx.trained.tokens.kernels.gpu.rounding import to_fp8, to_int8
from dynaxx.trained.tokens.kernels.triton.indexer import _index_scores_kernel, _index_tokens_kernel
from dynaxx.trained.tokens.spans import TokenSpans

__all__ = ["index_tokens", "to_fp8", "to_int8"]

MAX_SLOTS = 4096  # a program keeps them in lists of twice as many
HELD_HEADS, HELD_COLUMNS = 4, 512  # the largest q that stays in shared memory while keys stream
SCORE_BYTES = 256 << 20
MAX_COLUMNS = 1024  # widest fp32 rows that are split into 16-bit parts; wider ones are multiplied as fp32, slowly
BLOCK_Q, BLOCK_K = 64, 64
PROGRAMS_PER_PROCESSOR = 2
WARPS = 4
MAX_REGISTERS = None
SAMPLED_KEYS = 4096  # keys in the sample that gives a tile its first thresholds


def index_tokens(
    q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, spans: TokenSpans, slots: int
) -> Tensor:
    """Return the best blocks of each query, (T, 1, slots) int32, ascending, -1 behind."""
    chosen = torch.empty(q.shape[0], 1, slots, dtype=torch.int32, device=q.device)
    blocks = max((-(-(d - c) // spans.block_size) for c, d in pairwise(spans.ends_k)), default=0)
    if not (chosen.numel() and blocks):
        return chosen.fill_(-1)
    if q.dtype == torch.float8_e4m3fn:
        q, k = q.bfloat16(), k.bfloat16()  # exact: bf16 holds these numbers
        if q.device.type == "cpu":
            q, k = q.float(), k.float()  # the interpreter does not multiply bf16
    elif k_scale is not None:
        q, k = q.to(torch.int8), k.to(torch.int8)  # they are whole numbers already
    elif q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype:
        q, k = q.float(), k.float()
        if q.device.type != "cpu" and 6 * q.shape[2] <= MAX_COLUMNS:  # the interpreter does not multiply bf16
            q, k = _in_bf16(q, (0, 0, 1, 1, 0, 2)), _in_bf16(k, (0, 1, 0, 1, 2, 0))
    few = q.shape[0] < BLOCK_Q * processors(q.device) // 4
    block_q = 16 if few else BLOCK_Q
    fits = padded(q.shape[2]) * q.itemsize <= MAX_COLUMNS
    tiles, position, first_key = query_places(spans, block_q, q.device)
    shared: dict[str, Any] = {
        "p_q": q.contiguous(),
        "p_k": k.contiguous(),
        "p_weights": weights.float().contiguous(),
        "p_k_scale": weights if k_scale is None else k_scale.float().contiguous(),
        "p_tiles": tiles,
        "p_position": position,
        "p_first_key": first_key,
        "heads": q.shape[1],
        "D": q.shape[2],
        "BLOCK_D": max(32, padded(q.shape[2])),
        "GRAIN": spans.block_size,
        "BLOCK_Q": block_q,
        "BLOCK_K": max(BLOCK_K // (1 if fits else 2), spans.block_size),
        "SCALED": k_scale is not None,
        "num_warps": WARPS,
    }
    if few or slots > MAX_SLOTS:
        return _by_sorting(chosen, query_tiles(spans, block_q), blocks, shared)
    capacity = power_of_two(max(2 * slots, slots + 4 * BLOCK_K))
    held = q.shape[1] <= HELD_HEADS and q.shape[1] * shared["BLOCK_D"] <= HELD_COLUMNS
    programs = min(len(tiles), PROGRAMS_PER_PROCESSOR * processors(q.device))
    lists = torch.empty(programs, block_q, capacity, dtype=torch.int64, device=q.device)
    _index_tokens_kernel[(programs,)](
        **shared,
        p_lists=lists,
        p_chosen=chosen,
        tiles=len(tiles),
        slots=slots,
        CAPACITY=capacity,
        SAMPLES=min(SAMPLED_KEYS, capacity) // shared["BLOCK_K"],
        BLOCK_S=min(1024, power_of_two(slots)),
        HEADS=q.shape[1] if held else 0,
        PREFETCH=int(held),
        num_stages=2 if fits else 1,
        **gpu_of(q.device).limit_registers(MAX_REGISTERS),
    )
    return chosen


def _in_bf16(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Split fp32 numbers into three bf16 numbers that add up to them, in the given order, (..., len(order) * D).

    The products of rows whose orders pair 0-0, 0-1, 1-0, 1-1, 0-2 and 2-0 add up to fp32 products.
    """
    parts = []
    for _ in range(3):
        high = x.bfloat16()
        parts.append(high)
        x = torch.where(high.isfinite(), x - high.float(), 0.0)
    return torch.cat([parts[i] for i in order], -1)


def _by_sorting(chosen: Tensor, tiles: Tensor, blocks: int, shared: dict[str, Any]) -> Tensor:
    """Fill `chosen` by sorting scores, which are stored for a few tiles of queries at a time."""
    slots, block_q = chosen.shape[2], shared["BLOCK_Q"]
    step = max(1, SCORE_BYTES // (8 * blocks * block_q))
    kept = min(slots, blocks)
    for start in range(0, len(tiles), step):
        some = tiles[start : start + step]
        first, stop = int(some[0, 0]), int(some[-1].sum())
        scores = torch.full((stop - first, blocks), -1, dtype=torch.int64, device=chosen.device)
        columns = -(-blocks * shared["GRAIN"] // shared["BLOCK_K"])
        _index_scores_kernel[(len(some), columns)](**shared, p_scores=scores, columns=blocks, first_tile=start)
        best = scores.topk(kept, sorted=False).values
        block = torch.where(best < 0, blocks, 0x7FFFFFFF - (best & 0x7FFFFFFF)).sort(1).values
        chosen[first:stop, 0, :kept] = torch.where(block < blocks, block, -1).int()
        chosen[first:stop, 0, kept:] = -1
    return chosen
