# SPDX-License-Identifier: Apache-2.0
"""The loss of an indexer, defined: the divergence between dense attention and the softmax of the indexer's scores.

Sequences are packed. T queries, M keys, n slots; Hi heads of the indexer of width Di; Hq q heads, Hk kv heads of D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynaxx.layout.host import lasting_copy
from dynaxx.trained.tokens.kernels.reference.attention import token_mask
from dynaxx.trained.tokens.kernels.reference.indexer import index_scores, visible_keys
from dynaxx.trained.tokens.spans import TokenSpans

if TYPE_CHECKING:
    from dynaxx.trained.tokens.kernels.contract import IndexLossCall, IndexLossProblem

PIECE_BYTES = 64 << 20  # of scores of a few queries that are held at once


def unsupported_reasons(problem: IndexLossProblem) -> list[str]:
    """Return no reasons: the definition serves everything."""
    return []


def index_loss(call: IndexLossCall) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the divergence and the chosen share of attention, both summed over queries, and gradients of the former.

    A few queries are processed at a time, so memory is linear in the number of keys.
    """
    index_q, index_k, weights, q, k, block_indices, spans, scale, index_scale, needs_grad = call
    dtype = torch.promote_types(torch.promote_types(q.dtype, index_q.dtype), torch.float32)
    leaves = [lasting_copy(x.detach().to(dtype)).requires_grad_() for x in (index_q, index_k, weights)]
    grads = [torch.zeros_like(x, dtype=dtype) for x in leaves] if needs_grad else []
    total, covered = (torch.zeros((), dtype=dtype, device=q.device) for _ in range(2))
    for some, keys, own in spans.pieces(4 * (q.shape[1] + 2 * index_q.shape[1]), PIECE_BYTES):
        blocks = None if block_indices is None else block_indices[some]
        target, visible, mass = _target(q[some].to(dtype), k[keys].to(dtype), scale, blocks, own)
        with torch.enable_grad():
            piece = [leaves[0][some], leaves[1][keys], leaves[2][some]]
            loss = _divergence(target, visible, index_scores(*piece) * index_scale)
            if needs_grad:
                found = torch.autograd.grad(loss, piece)
                for grad, part, where in zip(grads, found, (some, keys, some), strict=True):
                    grad[where] += part
        total += loss.detach()
        covered += mass
    return total, covered, grads


def _target(
    q: Tensor, k: Tensor, scale: float, blocks: Tensor | None, spans: TokenSpans
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention (t, m) averaged over heads, the keys that count, and their share of attention, summed over t."""
    visible = visible_keys(spans, q.device)
    grouped = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)  # (Hk, G, t, D)
    logits = grouped @ k.permute(1, 2, 0)[:, None] * scale
    attention = logits.masked_fill_(~visible, -torch.inf).softmax(-1).nan_to_num_(0.0).mean((0, 1))
    if blocks is None:
        return attention, visible, attention.sum()
    visible = token_mask(blocks[:, None], spans)[0]
    kept = attention.masked_fill(~visible, 0.0)
    mass = kept.sum(-1, keepdim=True)
    return kept / mass.clamp(min=torch.finfo(torch.float32).tiny), visible, mass.sum()


def _divergence(target: Tensor, visible: Tensor, scores: Tensor) -> Tensor:
    """Return the sum over queries of KL(target || softmax of scores)."""
    seen = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf)
    logs = scores.masked_fill(~seen, 0.0).log_softmax(-1).masked_fill(~visible, 0.0)
    return (torch.special.xlogy(target, target) - target * logs).sum()
