# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer with its rules, in plain tensor operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxx.engines.portable.attention import dense_attention, dense_bias, gather_bias, gathered_attention
from dynaxx.engines.portable.plans import PortableRules
from dynaxx.engines.portable.rules import GatherRule

Known = dict[GatherRule | None, Tensor | None]  # bias by rule; None is the rule of heads that see all keys


def attend_by_rules(
    rules: PortableRules,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    *,
    causal: bool,
    known: Known,
) -> Tensor:
    """Attend: q (B, Hq, N, D), k and v (B, H, M, D), mask (B, M) bool or None; to (B, N, Hq, D).

    `known` caches the biases of this forward pass for all layers. Missing ones are computed and added.
    """
    for part in rules.parts:
        if part.rule not in known:
            known[part.rule] = bias_of(part.rule, q.shape[2], k.shape[2], q.dtype, causal=causal, key_mask=mask)
    if len(rules.parts) == 1:
        return _attend(rules.parts[0].rule, q, k, v, scale, known)
    group, outs = q.shape[1] // k.shape[1], []
    order: list[int] = []
    for part in rules.parts:
        heads, of_head = (
            torch.tensor(part.heads, dtype=torch.int64, device="cpu"),
            [head // group for head in part.heads],
        )
        used = sorted(set(of_head))
        evenly = all(of_head.count(each) * len(used) == len(of_head) for each in used)
        own = torch.tensor(used if evenly else of_head, dtype=torch.int64, device="cpu")
        keys, values = k.index_select(1, own), v.index_select(1, own)
        outs.append(_attend(part.rule, q.index_select(1, heads), keys, values, scale, known))
        order += part.heads
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), dtype=torch.int64, device="cpu")
    return torch.cat(outs, dim=2).index_select(2, back)


def bias_of(
    rule: GatherRule | None,
    seqlen_q: Any,
    seqlen_k: Any,
    dtype: torch.dtype,
    *,
    causal: bool,
    key_mask: Tensor | None = None,
) -> Tensor | None:
    """Return the bias of a rule for `seqlen_q` queries aligned to the last of `seqlen_k` keys; None hides nothing."""
    if rule is None:
        return dense_bias(seqlen_q, seqlen_k, dtype, causal=causal, key_mask=key_mask)
    return gather_bias(rule, seqlen_q, seqlen_k, dtype, key_mask)


def _attend(rule: GatherRule | None, q: Tensor, k: Tensor, v: Tensor, scale: float, known: Known) -> Tensor:
    if rule is not None:
        return gathered_attention(q, k, v, rule, scale=scale, bias=known[rule])
    return dense_attention(q, k, v, known[None], scale=scale)
