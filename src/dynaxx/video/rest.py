# SPDX-License-Identifier: Apache-2.0
"""The rest: attention to the blocks that a rule leaves out, estimated by the means of their keys and values.

The mean query of every `TILE` tokens attends to the mean key of every block that its row does not visit, weighted by
the number of keys. Its result is merged with the exact attention of each token, in the ratio of both sums of
exponentials. There are TILE * kv_block times fewer scores than in dense attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout
from dynaxx.ops import SparseAttentionOutput
from dynaxx.selection.scorers.base import pieces

TILE = 16  # queries with one estimate; a divisor of every q block
MEMORY = 1 << 30  # bytes of temporary scores, unless one head needs more
NOTHING = -1e30  # the score of a block without an estimate: finite, so that a row of them has no NaN


def rest_density(rest: Sequence[float], kv_block: int) -> float:
    """Return the scores of the rest as a share of those of dense attention."""
    return sum(share > 0 for share in rest) / max(1, len(rest)) / (TILE * kv_block)


def with_rest(
    exact: SparseAttentionOutput,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    rest: Sequence[float],
    *,
    scale: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Return exact attention merged with the estimate for the blocks that it leaves out. Differentiable.

    Args:
        exact: output and log-sum-exp of attention over `layout`.
        q: (batch, seqlen, heads, head_dim).
        k: as `q`.
        v: as `q`.
        layout: the visited blocks.
        rest: a factor per q head on the estimated sum of exponentials; 0.0 leaves the head's output as it is.
        scale: softmax scale, default head_dim ** -0.5.
        visible: (batch, seqlen) bool, the tokens that exist; all by default.
    """
    q_block, kv_block = layout.block_size
    with torch.autocast(q.device.type, enabled=False):
        factor = torch.tensor(rest, dtype=torch.float32, device=q.device)[:, None, None]
        queries = _means(q, TILE, visible)[0] * (q.shape[-1] ** -0.5 if scale is None else scale)
        (keys, count), (values, _) = (_means(x, kv_block, visible) for x in (k, v))
        keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in (keys, values))
        bias = count.clamp(min=1).log() + factor.clamp(min=1e-30).log()
        hidden = visited_blocks(layout) | (count == 0) | (factor == 0)
        hidden = hidden.repeat_interleave(q_block // TILE, 2)[:, :, : queries.shape[2]].expand(-1, q.shape[2], -1, -1)
        outs, lses = [], []
        row_bytes = 12 * q.shape[0] * queries.shape[2] * keys.shape[2]
        for first, last in pieces(q.shape[2], row_bytes, MEMORY):
            some = slice(first, last)
            scores = queries[:, some] @ keys[:, some].transpose(-1, -2) + bias[:, some]
            scores = scores.masked_fill(hidden[:, some], NOTHING)
            lses.append(scores.logsumexp(-1))
            outs.append(scores.softmax(-1) @ values[:, some])
        lse = torch.cat(lses, 1).repeat_interleave(TILE, 2)[:, :, : q.shape[1]]
        out = torch.cat(outs, 1).transpose(1, 2).to(exact.out.dtype).repeat_interleave(TILE, 1)[:, : q.shape[1]]
        share = torch.where(lse > NOTHING / 2, lse - exact.lse, -torch.inf).sigmoid()
        return torch.lerp(exact.out, out, share.transpose(1, 2)[..., None].to(out.dtype))


def visited_blocks(layout: BlockLayout) -> Tensor:
    """Return (layout_batch, layout_heads, q_blocks, kv_blocks) bool, without reading from the device."""
    shape = (layout.layout_batch, layout.layout_heads, layout.q_blocks, layout.kv_blocks)
    starts, place = layout.kv_indptr[..., :-1].flatten(), torch.arange(len(layout.kv_indices), device=layout.device)
    row = torch.searchsorted(starts, place.to(starts.dtype), right=True) - 1
    flat = torch.zeros(starts.numel() * layout.kv_blocks + 1, dtype=torch.bool, device=layout.device)
    beyond = place >= layout.kv_indptr.flatten()[-1]
    flat.index_fill_(0, torch.where(beyond, len(flat) - 1, row * layout.kv_blocks + layout.kv_indices), True)
    return flat[:-1].view(shape)


def _means(x: Tensor, size: int, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return means of every `size` visible tokens, (batch, heads, n, head_dim), and their number, (batch, 1, 1, n)."""
    ones = x.new_ones(1, x.shape[1], 1, 1, dtype=torch.float32) if visible is None else visible[:, :, None, None]
    total = _sums(x if visible is None else x * ones, size)
    count = _sums(ones, size)
    return total / count.clamp(min=1), count.transpose(-1, -2)


def _sums(x: Tensor, size: int) -> Tensor:
    """Return sums of every `size` tokens: (batch, seqlen, heads, head_dim) -> (batch, heads, n, head_dim)."""
    whole, dtype = x.shape[1] // size, torch.promote_types(x.dtype, torch.float32)
    sums = x[:, : whole * size].unflatten(1, (whole, size)).sum(2, dtype=dtype)
    if x.shape[1] % size:
        sums = torch.cat([sums, x[:, whole * size :].sum(1, keepdim=True, dtype=dtype)], 1)
    return sums.transpose(1, 2)
