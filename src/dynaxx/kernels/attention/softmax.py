# SPDX-License-Identifier: Apache-2.0
"""`masked_attention`: dense softmax attention over visible keys, shared by the reference's attention and decode.

Legend: B batch; N queries, M keys; Hq q heads; D head_dim of q and k, E head_dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.layout.host import without_autocast


@without_autocast
def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, N, Hq, E) in q's dtype and lse (B, Hq, N) in k's. A query that sees nothing has out = 0.

    Args:
        q: (B, N, Hq, D).
        k: (B, M, Hq, D), in the dtype to compute in.
        v: (B, M, Hq, E), in the same dtype.
        visible: bool, broadcastable to (B, Hq, N, M).
        scale: factor on the scores.
        softcap: c in c tanh(score / c), or None.
        bias: (B, Hq, N, M) added to the scaled and capped scores, or None.
        sinks: (Hq,) scores of one more key with value zero, neither scaled nor capped, or None.
    """
    scores = torch.einsum("bnhd,bmhd->bhnm", q.to(k.dtype), k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        column = sinks.to(k.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        visible = torch.cat([visible.expand_as(scores), column > -torch.inf], -1)
        scores, v = torch.cat([scores, column], -1), torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 1))
    scores = scores.masked_fill(~visible, -torch.inf)
    sees_any = visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~sees_any, 0.0).softmax(-1) * sees_any
    lse = scores.masked_fill(~sees_any, 0.0).logsumexp(-1).masked_fill(~sees_any[..., 0], -torch.inf)
    return torch.einsum("bhnm,bmhe->bnhe", weights, v).to(q.dtype), lse
