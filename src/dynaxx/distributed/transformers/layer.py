# SPDX-License-Identifier: Apache-2.0
"""One attention layer of a model whose sequence is split over ranks: own tokens in, attention over all tokens out.

A layer without a rule of the policy, or with a window of its own, runs the model's own pattern as a layout of the whole
sequence. A rule by position is a layout of the whole sequence too. A rule over data that chooses row by row runs where
its rows are. Any other rule over data runs with the heads split over the ranks instead.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.distributed.attention import sparse_attention
from dynaxx.distributed.by_rule.attention import sparse_attention_by_rule
from dynaxx.distributed.heads import HeadShare, attend_by_heads
from dynaxx.distributed.rules import chooses_row_by_row
from dynaxx.distributed.split import SequenceSplit
from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.calls.arguments import sinks_of
from dynaxx.integrations.transformers.calls.dense_fallback import DenseAttention
from dynaxx.integrations.transformers.calls.own_pattern import pattern_of
from dynaxx.integrations.transformers.calls.signature import ScoreOptions
from dynaxx.integrations.transformers.decoder import DENSE
from dynaxx.integrations.transformers.masks.lazy import LazyMask
from dynaxx.integrations.transformers.masks.rules import MaskRule
from dynaxx.layout import BlockLayout
from dynaxx.layout.cache import LayoutCache
from dynaxx.ops import sparse_attention as attend_on_one_device
from dynaxx.ops.checks import follow_autocast
from dynaxx.patterns import Pattern
from dynaxx.policy import LayerPlan


class SplitModel:
    """Hold what the layers of a split model share.

    Attributes:
        group: the group of the ranks.
        rank: this process's rank in it.
        block: tokens per block of layouts of the model's own pattern.
        runs_rules: whether the sequence runs by the policy's rules.
        counts: attention calls, "sparse" by rules and "own_pattern" by the model's own pattern.
    """

    group: Any
    rank: int
    block: int
    runs_rules: bool
    counts: Counter[str]
    _split: SequenceSplit | None

    @property
    def split(self) -> SequenceSplit:
        """The tokens of each rank in the last sequence given to `shard`.

        Raises:
            RuntimeError: `shard` has not been called.
        """
        if self._split is None:
            raise RuntimeError("no sequence is split yet: call model(**handle.shard(input_ids))")
        return self._split


class SplitLayer:
    """The attention of one module while its model's sequence is split.

    Args:
        model: what the layers of the model share.
        index: of the layer.
        plan: the policy's prefill rules of the layer; None without any.
    """

    def __init__(self, model: SplitModel, index: int, plan: LayerPlan | None) -> None:
        self._model, self.index, self.plan = model, index, plan

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: Any) -> Tensor:
        """Attend from own tokens to those of all ranks: q (B, Hq, L, D), k and v (B, Hk, L, D) to (B, L, Hq, D).

        Raises:
            ValueError: other tokens than `shard` gave this rank.
            UnsupportedInputError: an attention call that cannot be split.
        """
        scores = ScoreOptions.of(kwargs, DenseAttention(module, DENSE))
        rule = _rule_of(mask, self.index, scores, kwargs)
        split, rank, group = self._model.split, self._model.rank, self._model.group
        if not q.shape[2] == k.shape[2] == split.length(rank):
            raise ValueError(
                f"the model must run on the {split.length(rank)} tokens that `handle.shard` gave rank {rank}, without "
                f"a cache, got {q.shape[2]} queries and {k.shape[2]} keys: call model(**handle.shard(input_ids))"
            )
        q, k, v = (x.transpose(1, 2) for x in follow_autocast(q, k, v))
        options: dict[str, Any] = {"scale": scores.scale, "softcap": scores.softcap, "sinks": sinks_of(kwargs)}
        plan = self.plan
        if plan is None or not self._model.runs_rules or _is_local(rule, split.seqlen):
            layout = _own_layout(pattern_of(rule, split.seqlen), split.seqlen, self._model.block, q.device)
            found = sparse_attention(q, k, v, layout, group, split=split, **options)
            self._model.counts["own_pattern"] += 1
            return _tensor(found)
        self._model.counts["sparse"] += 1
        if plan.is_static:
            layout = _static_layout(plan, split.seqlen, q.device)
            return _tensor(sparse_attention(q, k, v, layout, group, split=split, **options))
        if is_row_by_row(plan):
            rule_of_layer = plan.groups[0].rule
            assert not isinstance(rule_of_layer, Pattern), "a plan by position is static"
            sizes = plan.block_size
            return _tensor(sparse_attention_by_rule(q, k, v, rule_of_layer, split, group, block_size=sizes, **options))
        return self._by_heads(plan, q, k, v, options)

    def _by_heads(self, plan: LayerPlan, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Let each rank choose and attend for some heads of the whole sequence."""
        split, sinks = self._model.split, options.pop("sinks")
        own = plan.shard(self._model.rank, split.ranks)

        def attend(q_all: Tensor, k_all: Tensor, v_all: Tensor, *, share: HeadShare) -> Tensor:
            layout = own.layout(q_all, k_all, scale=options["scale"])
            of_share = None if sinks is None else sinks[share.q_heads]
            return _tensor(attend_on_one_device(q_all, k_all, v_all, layout, sinks=of_share, **options))

        return attend_by_heads(attend, (q, k, v), (True, False, False), split, self._model.group)


def is_row_by_row(plan: LayerPlan) -> bool:
    """Return whether one rule serves all heads and chooses for each row of blocks by itself, so ranks choose alone."""
    return len(plan.groups) == 1 and chooses_row_by_row(plan.groups[0].rule)


def _rule_of(mask: Tensor | None, index: int, scores: ScoreOptions, kwargs: dict[str, Any]) -> MaskRule:
    """Return what the model shows each query.

    Raises:
        UnsupportedInputError: dropout, unknown arguments, documents or padding.
    """
    reasons = []
    if scores.unserved is not None:
        reasons.append(f"{scores.unserved} {scores.argument or ''}".rstrip())
    if not isinstance(mask, LazyMask):
        reasons.append("its mask is not made of the parts that dynaxx reads: causal, windows, chunks")
    elif mask.rule.documents is not None:
        reasons.append("packed documents: pass one sequence per row, from `handle.shard`, with its attention_mask")
    elif not mask.rule.causal or mask.rule.blocks is not None:
        reasons.append("it attends to later tokens")
    if reasons:
        raise UnsupportedInputError(f"layer {index} with the sequence split over ranks", {"transformers": reasons})
    assert isinstance(mask, LazyMask), "refused above"
    return mask.rule


def _is_local(rule: MaskRule, seqlen: int) -> bool:
    return any(size is not None and size < seqlen for size in (rule.window, rule.chunk))


def _tensor(found: Any) -> Tensor:
    assert isinstance(found, Tensor), "no lse was asked for"
    return found


@LayoutCache
def _own_layout(pattern: Pattern, seqlen: int, block: int, device: torch.device) -> BlockLayout:
    return pattern.layout(seqlen, seqlen, block_size=block, device=device)


@LayoutCache
def _static_layout(plan: LayerPlan, seqlen: int, device: torch.device) -> BlockLayout:
    nothing = torch.empty(1, seqlen, 1, 1, device=device, dtype=torch.float32)
    return plan.layout(nothing, nothing)
