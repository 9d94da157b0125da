# SPDX-License-Identifier: Apache-2.0
"""Dense softmax attention over visible keys, and its gradients: the definition behind every reference.

Legend: B batch; N queries, M keys; Hq q heads; D head_dim of q and k, E head_dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
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


@without_autocast
def masked_gradients(
    do: Tensor,
    dlse: Tensor | None,
    saved: SavedForward,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, and the gradient of the scores before softcap and scale, (B, Hq, N, M), which a bias gets.

    With weights P = exp(scores - lse), zero for hidden pairs: dP = do v^T, dS = P (dP - (do . out) + dlse). With a
    softcap c, dS is multiplied by 1 - tanh(s / c) ** 2. k and v have Hk heads; they and q may be of any dtype.
    """
    q, k, v, out, lse = saved
    kv_heads, dtype = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    wide_q, wide_do, wide_out, lse = (x.to(dtype) for x in (q, do, out, lse))
    wide_k, wide_v = (x.to(dtype).repeat_interleave(q.shape[2] // kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", wide_q, wide_k) * scale
    slope: float | Tensor = 1.0
    if softcap is not None:
        capped = (scores / softcap).tanh()
        scores, slope = softcap * capped, 1 - capped**2
    if bias is not None:
        scores = scores + bias
    empty = lse == -torch.inf
    weights = (scores - lse.masked_fill(empty, 0.0)[..., None]).masked_fill(~visible, -torch.inf).exp()
    delta = (wide_do * wide_out).sum(-1).transpose(1, 2) - (0.0 if dlse is None else dlse.masked_fill(empty, 0.0))
    d_bias = weights * (torch.einsum("bnhe,bmhe->bhnm", wide_do, wide_v) - delta[..., None])
    d_scores = d_bias * slope * scale
    dq = torch.einsum("bhnm,bmhd->bnhd", d_scores, wide_k)
    dk = torch.einsum("bhnm,bnhd->bmhd", d_scores, wide_q).unflatten(2, (kv_heads, -1)).sum(3)
    dv = torch.einsum("bhnm,bnhe->bmhe", weights, wide_do).unflatten(2, (kv_heads, -1)).sum(3)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias
