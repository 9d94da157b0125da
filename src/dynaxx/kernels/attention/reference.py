# SPDX-License-Identifier: Apache-2.0
"""Reference definition of sparse attention: softmax attention over exactly the pairs that the layout shows.

With a softcap c, a score s becomes c tanh(s / c), which lies between -c and c, before the softmax (Gemma 2).

Legend: B batch; Hq, Hk query and kv heads; N queries, M keys; D head_dim of q and k, E head_dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.attention.softmax import masked_attention
from dynaxx.kernels.bias import add_gradient, bias_of_pairs, sums_by_distance, table_of
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import without_autocast


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return no reasons: the reference serves every problem. It allocates seqlen_q x seqlen_k scores."""
    return []


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, N, Hq, E) in q's dtype and lse (B, Hq, N), natural log, in fp32 (fp64 for fp64 inputs).

    Computes in fp32 or better. A query that sees nothing has out = 0, lse = -inf and zero gradients. sinks (Hq,) are
    added to the softmax of their head as the score of one more key with value zero; they are neither scaled nor capped.
    A bias, a table or slopes as in `kernels.bias`, is added to the capped scores.
    Differentiable by autograd. A given `out` receives the result.
    """
    group_size = q.shape[2] // k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (x.to(dtype).repeat_interleave(group_size, dim=2) for x in (k, v))
    of_pairs = bias_of_pairs(table_of(bias, q.shape[1], k.shape[1]), q.shape[1])
    found, lse = masked_attention(q, k, v, layout.to_dense(), scale, softcap, sinks, of_pairs)
    return (found if out is None else out.copy_(found)), lse


@without_autocast
def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes and shapes of q, k, v. do is the gradient of out, dlse that of lse or None.

    With weights P = exp(scores - lse), zero for hidden pairs: dP = do v^T, dS = P (dP - (do . out) + dlse). With a
    softcap c, dS is multiplied by 1 - tanh(s / c) ** 2. A given dbias receives the sums of dS, before that and the
    scale, over the pairs of each distance, or the gradient of slopes.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide_q, wide_do, wide_out = (x.to(dtype) for x in (q, do, out))
    wide_k, wide_v = (x.to(dtype).repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", wide_q, wide_k) * scale
    slope: float | Tensor = 1.0
    if softcap is not None:
        capped = (scores / softcap).tanh()
        scores, slope = softcap * capped, 1 - capped**2
    of_pairs = bias_of_pairs(table_of(bias, q.shape[1], k.shape[1]), q.shape[1])
    if of_pairs is not None:
        scores = scores + of_pairs
    shift = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
    weights = (scores - shift).masked_fill(~layout.to_dense(), -torch.inf).exp()
    delta = (wide_do * wide_out).sum(-1).transpose(1, 2) - (0.0 if dlse is None else dlse)
    d_scores = weights * (torch.einsum("bnhe,bmhe->bhnm", wide_do, wide_v) - delta[..., None])
    if dbias is not None:
        add_gradient(dbias, sums_by_distance(d_scores), q.shape[1], k.shape[1])
    d_scores = d_scores * slope * scale
    dq = torch.einsum("bhnm,bmhd->bnhd", d_scores, wide_k)
    dk = torch.einsum("bhnm,bnhd->bmhd", d_scores, wide_q).unflatten(2, (kv_heads, -1)).sum(3)
    dv = torch.einsum("bhnm,bnhe->bmhe", weights, wide_do).unflatten(2, (kv_heads, -1)).sum(3)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
