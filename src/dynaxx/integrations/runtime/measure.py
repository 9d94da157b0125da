# SPDX-License-Identifier: Apache-2.0
"""Measure one sampled call: recompute a few query rows densely, and compare them with the layout's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout
from dynaxx.selection.recall import visible_keys
from dynaxx.selection.scorers.base import MEMORY_BUDGET

NEAREST = 64  # number of keys that count as local


class Rows(NamedTuple):
    """Some query rows of a call in dense attention, in fp32. Shapes: H q heads, R rows, N keys."""

    indices: Tensor  # (R,) int64
    probabilities: Tensor  # (H, R, N)
    out: Tensor  # (H, R, D)


class CallMeasure(NamedTuple):
    """Means over the rows per q head, each (H,) fp32."""

    recall: Tensor  # share of dense attention mass on visible keys
    error: Tensor  # |sparse - dense| / |dense| of the output, both summed over the rows
    entropy: Tensor  # entropy of dense attention relative to a uniform distribution over the same keys
    local: Tensor  # share of dense attention mass on the nearest keys

    def cpu(self) -> CallMeasure:
        """Return a copy on the host."""
        return CallMeasure(*(each.cpu() for each in self))

    def statistics(self) -> Tensor:
        """Return (statistics, heads), in the order of `dynaxx.policy.profile.STATISTICS`."""
        return torch.stack([self.recall, self.entropy, self.local])


def most_rows(heads: int, seqlen_k: int, rows: int) -> int:
    """Return the number of rows, reduced if their scores would take too much memory."""
    return max(1, min(rows, MEMORY_BUDGET // (4 * 4 * heads * max(1, seqlen_k))))


def dense_rows(q: Tensor, k: Tensor, v: Tensor, indices: Sequence[int], scale: float | None) -> Rows:
    """Attend densely and causally from some rows of q (1, Lq, H, D), aligned to the last keys of k, v (1, Lk, G, D)."""
    (_, seqlen_q, heads, dim), (_, seqlen_k, kv_heads, _) = q.shape, k.shape
    at = torch.tensor(list(indices), device=q.device, dtype=torch.int64)
    queries = q[0, at].float().view(len(at), kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)  # (G, H / G, R, D)
    keys, values = (x[0].float().transpose(0, 1)[:, None] for x in (k, v))  # (G, 1, N, D)
    scores = queries @ keys.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    position = torch.arange(seqlen_k, device=q.device)
    scores.masked_fill_(position > (at + seqlen_k - seqlen_q)[:, None], -torch.inf)
    probabilities = scores.softmax(-1)
    out = probabilities @ values
    return Rows(at, probabilities.flatten(0, 1), out.flatten(0, 1))


def measure(rows: Rows, v: Tensor, layout: BlockLayout, ran: Tensor | None = None) -> CallMeasure:
    """Compare the attention of a layout with dense attention.

    Args:
        rows: the dense rows, see `dense_rows`.
        v: (1, Lk, G, D).
        layout: a layout of the same lengths and batch 1.
        ran: (R, H, D) output of the kernel for these rows; None computes it here.
    """
    visible = visible_keys(layout, rows.indices)[0]  # (H | 1, R, N)
    p = rows.probabilities
    kept = p * visible
    recall = kept.sum(-1)
    if ran is None:
        heads, kv_heads = p.shape[0], v.shape[2]
        values = v[0].float().transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
        sparse = kept @ values / recall.clamp(min=1e-20)[..., None]
    else:
        sparse = ran.float().transpose(0, 1)
    error = (sparse - rows.out).norm(dim=-1).sum(-1) / rows.out.norm(dim=-1).sum(-1).clamp(min=1e-20)
    seen = (p > 0).sum(-1).clamp(min=2)
    entropy = -torch.special.xlogy(p, p).sum(-1) / seen.log()
    ends = rows.indices + p.shape[-1] - layout.seqlen_q  # each row's own key
    near = torch.arange(p.shape[-1], device=p.device) > (ends - NEAREST)[:, None]
    mean = lambda x: x.clamp(max=1.0).mean(-1)
    return CallMeasure(mean(recall), error, mean(entropy), mean((p * near).sum(-1)))
