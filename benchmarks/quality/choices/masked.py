# SPDX-License-Identifier: Apache-2.0
"""Dense attention masked to blocks, and what stands in for the others.

H / Hk q and kv heads, N tokens, D head_dim.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from benchmarks.quality.choices.ways import grid_of

PADDED = 64  # columns beside the values, aligned for matrix products


@dataclass
class Dense:
    """Queries, keys, values and the dense attention of a layer."""

    q: torch.Tensor  # (H, N, D)
    k: torch.Tensor  # (Hk, N, D)
    v: torch.Tensor  # (Hk, N, D + PADDED), `with_ones` of the values
    p: torch.Tensor  # (H, N, N)
    scale: float

    @property
    def lse(self):
        """(H, N): the logarithm of the sum of each row, from its largest probability."""
        largest, where = self.p.max(-1)
        keys = self.k.float().repeat_interleave(self.q.shape[0] // self.k.shape[0], 0)
        found = keys.gather(1, where[..., None].expand(-1, -1, keys.shape[2]))
        return (self.q.float() * found).sum(-1) * self.scale - largest.float().log()


@lru_cache(maxsize=4)
def hidden_of(tokens, device):
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def probabilities(q, k, scale):
    """Return the dense attention (H, N, N) of (H, N, D) queries and (Hk, N, D) keys."""
    group = q.shape[0] // k.shape[0]
    logits = torch.matmul(q.view(k.shape[0], -1, q.shape[2]) * scale, k.transpose(1, 2)).view(
        q.shape[0], q.shape[1], -1
    )
    logits.masked_fill_(hidden_of(q.shape[1], q.device), -torch.inf)
    assert group * k.shape[0] == q.shape[0]
    return torch.softmax(logits, -1)


def attend(dense, blocks, choice):
    """Return the output (H, N, D) fp32 of dense attention masked to blocks, with what stands in for the others."""
    p, v = dense.p, dense.v
    heads, tokens, _ = p.shape
    tiles = p.view(heads, tokens // choice.q_block, choice.q_block, -1, choice.kv_block)
    masked = tiles if blocks is None else tiles * blocks[:, :, None, :, None].to(p.dtype)
    out = torch.matmul(masked.view(v.shape[0], -1, tokens), v).view(heads, tokens, -1).float()
    dim = v.shape[2] - PADDED
    if blocks is not None and choice.omitted:
        out = out + stand_ins(dense, blocks, choice, out[..., dim : dim + 1])
    return out[..., :dim] / out[..., dim : dim + 1].clamp(min=1e-30)


def grouped(weights, values):
    """Return (H, M, K) weights times (Hk, K, D) values, (H, M, D) fp32."""
    found = torch.matmul(weights.to(values.dtype).reshape(values.shape[0], -1, weights.shape[2]), values)
    return found.view(*weights.shape[:2], -1).float()


def stand_ins(dense, blocks, choice, mass):
    """Return what omitted blocks contribute beside the visible mass (H, N, 1) of each query: (H, N, D + PADDED)."""
    heads, tokens, dim = dense.q.shape
    rows = tokens // choice.q_block
    omitted = grid_of(choice, tokens, mass.device)[0] & ~blocks
    spread = lambda found: found.repeat_interleave(choice.q_block, 1)
    if choice.omitted == "means":
        mean = lambda x: x.float().view(x.shape[0], -1, choice.kv_block, x.shape[2]).mean(2)
        logits = grouped(dense.q.float(), mean(dense.k).transpose(1, 2).contiguous()) * dense.scale
        weights = (logits + math.log(choice.kv_block) - dense.lse[..., None]).exp() * spread(omitted)
        return grouped(weights, mean(dense.v))
    tokens_of = omitted.repeat_interleave(choice.kv_block, 2)
    if choice.omitted == "row":
        at = torch.arange(rows, device=mass.device) * choice.q_block + choice.q_block // 2
        found = grouped(dense.p[:, at] * tokens_of, dense.v)
        share = found[..., dim : dim + 1]
        return spread(found / (1 - share).clamp(min=1e-6)) * mass
    queries = dense.q.float().view(heads, rows, choice.q_block, dim).mean(2) * dense.scale
    logits = grouped(queries, dense.k.float().transpose(1, 2).contiguous())
    ends = (torch.arange(rows, device=mass.device) + 1) * choice.q_block
    logits.masked_fill_(torch.arange(tokens, device=mass.device) >= ends[:, None], -torch.inf)
    total = logits.logsumexp(-1, keepdim=True)
    found = grouped((logits - total).exp() * tokens_of, dense.v)
    if choice.omitted == "query":
        return spread(found) * (spread(total) - dense.lse[..., None]).exp()
    share = found[..., dim : dim + 1]
    return spread(found / (1 - share).clamp(min=1e-6)) * mass


def with_ones(v):
    """Append a column of ones, whose product is the visible mass, and zeros up to an aligned width."""
    more = torch.zeros(*v.shape[:2], PADDED, dtype=v.dtype, device=v.device)
    more[..., 0] = 1
    return torch.cat([v, more], -1)


def heads_first(query, key, value):
    return tuple(each[0].float().contiguous() for each in (query, key, value))
