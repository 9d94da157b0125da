# SPDX-License-Identifier: Apache-2.0
"""Reference definition of sparse attention: softmax attention over exactly the pairs that the layout shows.

With a softcap c, a score s becomes c tanh(s / c), which lies between -c and c, before the softmax (Gemma 2).

Legend: B batch; Hq, Hk query and kv heads; N queries, M keys; D head_dim of q and k, E head_dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import AttentionProblem, SavedForward
from dynaxx.kernels.attention.softmax import masked_attention, masked_gradients
from dynaxx.kernels.bias import add_gradient, bias_of_pairs, sums_by_distance, table_of
from dynaxx.layout import BlockLayout


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

    A given dbias receives the gradient of the bias: sums over the pairs of each distance, or the gradient of slopes.
    """
    of_pairs = bias_of_pairs(table_of(bias, q.shape[1], k.shape[1]), q.shape[1])
    saved = SavedForward(q, k, v, out, lse)
    *grads, d_bias = masked_gradients(do, dlse, saved, layout.to_dense(), scale, softcap, of_pairs)
    if dbias is not None:
        add_gradient(dbias, sums_by_distance(d_bias), q.shape[1], k.shape[1])
    return grads[0], grads[1], grads[2]
