# SPDX-License-Identifier: Apache-2.0
"""Measure the share of dense attention that a layout keeps, on sampled queries."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import refuse_transforms
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout import FULL, BlockLayout
from dynaxx.layout.host import on_host
from dynaxx.selection.scorers.base import MEMORY_BUDGET, per_kv_head, pieces


class Recall(NamedTuple):
    """Share of dense attention mass on visited pairs, averaged over queries, q heads and batch; 1.0 loses nothing.

    Attributes:
        mean: mean over the sampled queries.
        low: lower end of the 95 % confidence interval of the mean over all queries; equal to `mean` if all were
            sampled.
        high: upper end of that interval.
        per_head: (q_heads,) fp32, averaged over the same queries and the batch.
    """

    mean: float
    low: float
    high: float
    per_head: Tensor


@typed
@torch.no_grad()
@on_host
def recall(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    *,
    rows: int = 256,
    seed: int = 0,
    scale: float | None = None,
    causal: bool = True,
) -> Recall:
    """Measure the share of dense attention mass that falls on the visible pairs of a layout.

    The function draws `rows` query positions at random without replacement, from those that see any key, and computes
    their attention in full. All heads and batch entries use the same positions. The confidence interval is Student's t
    over the rows (averaged over heads and batch entries), with the correction for a finite population, clipped to
    [0, 1]. A loss that affects few queries may be missed by the sample.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        layout: shared, or one per batch entry or q head.
        rows: number of query positions to sample; the result is exact if there are no more than that.
        seed: seed of the sample.
        scale: softmax scale, default head_dim ** -0.5.
        causal: whether the dense attention is causal.

    Raises:
        TypeError: `q` or `k` is not a tensor, or `layout` is not a layout.
        ValueError: tensors and layout do not fit, the scale is not finite, or `rows` is below 2.
    """
    refuse_transforms("`recall`", q, k, fix="measure outside the transformed function")
    _check(q, k, layout, rows)
    (batch, seqlen_q, heads, dim), seqlen_k = q.shape, k.shape[1]
    scale = softmax_scale(scale, dim)
    first = max(0, seqlen_q - seqlen_k) if causal else 0  # earlier queries see nothing
    population = seqlen_q - first if seqlen_k else 0
    drawn = torch.randperm(population, generator=torch.Generator().manual_seed(int(seed)))[:rows].sort().values + first
    values = torch.ones(len(drawn), batch, heads, device=q.device, dtype=torch.float32)  # recall of each row
    row_bytes = batch * heads * (5 * 4 * seqlen_k + 8 * dim)
    for a, b in pieces(len(drawn), row_bytes, MEMORY_BUDGET):
        some = drawn[a:b].to(q.device)
        scores = _scores(q[:, some], k, scale)
        if causal:
            position = torch.arange(seqlen_k, device=q.device)
            scores.masked_fill_(position > (some + seqlen_k - seqlen_q)[:, None], -torch.inf)
        share = scores.softmax(-1)
        values[a:b] = share.masked_fill_(~visible_keys(layout, some), 0.0).sum(-1).permute(2, 0, 1)
    if not values.numel():
        return Recall(1.0, 1.0, 1.0, torch.ones(heads, device=q.device, dtype=torch.float32))
    return _estimate(values.clamp(max=1.0), population)


def _check(q: Tensor, k: Tensor, layout: BlockLayout, rows: int) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or not x.is_floating_point() or x.shape[2] == 0:
            raise ValueError(
                f"`{name}` must be (batch, seqlen, heads, head_dim) of floats, got {x.dtype} {tuple(x.shape)}"
            )
    if not (q.device == k.device == layout.device) or q.is_meta:
        raise ValueError(
            f"`q`, `k` and `layout` must be on one device, with data, got {q.device}, {k.device} and {layout.device}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            "`q` and `k` must be (batch, seqlen, heads, head_dim), q_heads a multiple of kv_heads, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if (layout.seqlen_q, layout.seqlen_k) != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"`layout` must have lengths {(q.shape[1], k.shape[1])}, got {(layout.seqlen_q, layout.seqlen_k)}"
        )
    if layout.layout_batch not in (1, q.shape[0]) or layout.layout_heads not in (1, q.shape[2]):
        raise ValueError(
            f"`layout` must be shared or have batch {q.shape[0]} and {q.shape[2]} q heads, "
            f"got {(layout.layout_batch, layout.layout_heads)}"
        )
    if rows < 2:
        raise ValueError(f"`rows` must be >= 2, got {rows}")


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scores, (B, R, Hq, D), (B, N, Hk, D) -> (B, Hq, R, N), in fp32, or in fp64 for fp64 inputs."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries = q.transpose(1, 2).to(dtype) * scale
    scores = torch.empty(*queries.shape[:3], k.shape[1], dtype=dtype, device=q.device)
    for a, b in pieces(k.shape[1], k[:, :1].numel() * dtype.itemsize, MEMORY_BUDGET // 8):
        scores[..., a:b] = per_kv_head(queries, k[:, a:b].to(dtype).permute(0, 2, 3, 1))
    return scores


def visible_keys(layout: BlockLayout, rows: Tensor) -> Tensor:
    """Return (layout_batch, layout_heads, R, seqlen_k) bool, the keys that the queries in `rows` see."""
    (q_block, kv_block), count = layout.block_size, len(rows)
    starts = layout.kv_indptr[..., rows // q_block].flatten().long()
    lengths = layout.kv_num_blocks[..., rows // q_block].flatten().long()
    owner = torch.repeat_interleave(torch.arange(len(starts), device=rows.device), lengths)
    entry = torch.arange(len(owner), device=rows.device) - (lengths.cumsum(0) - lengths - starts)[owner]
    mask_ids = layout.kv_masks[entry].long()
    keys = torch.ones(len(entry), kv_block, dtype=torch.bool, device=rows.device)
    partial = (mask_ids != FULL).nonzero().flatten()
    if len(partial):
        words = layout.masks.bits[mask_ids[partial], (rows % q_block)[owner[partial] % count]]  # (n, words) int32
        bit = torch.arange(kv_block, device=rows.device)
        keys[partial] = (words[:, bit // 32] >> (bit % 32).int()) & 1 == 1
    seen = torch.zeros(len(starts), layout.kv_blocks, kv_block, dtype=torch.bool, device=rows.device)
    seen[owner, layout.kv_indices[entry].long()] = keys
    return seen.flatten(1)[:, : layout.seqlen_k].view(layout.layout_batch, layout.layout_heads, count, -1)


def _estimate(values: Tensor, population: int) -> Recall:
    """Estimate the recall from (R, B, Hq) shares of R rows out of `population`."""
    count, per_row = len(values), values.double().mean((1, 2))
    mean, half = float(per_row.mean()), 0.0
    if count < population:
        error = float(per_row.std()) * math.sqrt((1 - count / population) / count)
        half = student_t(count - 1) * error
    return Recall(mean, max(0.0, mean - half), min(1.0, mean + half), values.mean((0, 1)).float())


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t.

    It is exact for 1 and 2 degrees of freedom. Above, it is the expansion in 1 / n of Cornish and Fisher (Abramowitz
    and Stegun 26.7.5), with an error below 0.02 at 3 and 0.001 from 6 on.
    """
    if freedom <= 2:
        return (12.7062, 4.3027)[freedom - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
