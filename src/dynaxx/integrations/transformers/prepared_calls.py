# SPDX-License-Identifier: Apache-2.0
"""Prepared calls of layers: the first layer with a plan checks and prepares its call, and equal layers repeat it.

A prepared call is kept with the plan of a pass, and found again by later passes of the same shapes: with the policy in
force if it follows a rule, with the layout if it runs the model's own pattern.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from dynaxx.integrations.runtime.routing import Route
from dynaxx.integrations.transformers.arguments import Scores
from dynaxx.integrations.transformers.forward_context import ForwardContext
from dynaxx.integrations.transformers.planning import Work
from dynaxx.layout import BlockLayout
from dynaxx.ops.prepared.layer import prepare_layout, prepare_rule, prepared_layout
from dynaxx.patterns import Pattern
from dynaxx.policy import LayerPlan

MOST_CALLS = 256  # prepared calls of a policy; prompts of new lengths have new ones


def restore_prepared(
    current: ForwardContext, layer: int, work: Work, scores: Scores, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """Set `work.prepared` to the call that an earlier pass prepared, if there is one.

    Args:
        current: the context of the pass.
        layer: index of the layer.
        work: the plan of the call.
        scores: its options.
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
    """
    if current.deployed.sources or not _is_whole(work, q, k):
        work.may_prepare = False
    elif work.route is Route.NATIVE:
        layout = work.parts[0].layout
        assert layout is not None, "a whole part has a layout"
        work.prepared = prepared_layout(layout, q, k, v, scale=scores.scale, softcap=scores.softcap)
    elif work.plans[0][0].is_static:  # kept with the layout, whose cache is bounded by bytes
        layout = work.plans[0][0].layout(q, k, scale=scores.scale)
        work.prepared = prepared_layout(layout, q, k, v, scale=scores.scale, softcap=scores.softcap)
    else:
        work.prepared = current.deployed.prepared.get(_key(current, layer, scores, q, k, v))


def prepare(
    current: ForwardContext,
    layer: int,
    work: Work,
    scores: Scores,
    layout: BlockLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: LayerPlan | None = None,
) -> None:
    """Prepare a call that just ran over `layout`: by the rule of `plan`, or the model's own pattern if it is None."""
    work.may_prepare = False
    if plan is None or plan.is_static:
        work.prepared = prepare_layout(layout, q, k, v, scale=scores.scale, softcap=scores.softcap)
        return
    if len(plan.groups) > 1 or plan is not current.deployed.plans.get(layer):
        return
    rule = plan.groups[0].rule
    assert not isinstance(rule, Pattern), "the plan is not static"
    work.prepared = prepare_rule(rule, layout, q, k, v, scale=scores.scale, softcap=scores.softcap)
    if work.prepared is not None:
        kept = current.deployed.prepared
        if len(kept) >= MOST_CALLS:
            kept.clear()
        kept[_key(current, layer, scores, q, k, v)] = work.prepared


def _is_whole(work: Work, q: Tensor, k: Tensor) -> bool:
    """Return whether a call has one plan that covers all of its queries and keys."""
    if work.route is Route.NATIVE:
        return len(work.parts) == 1 and work.parts[0].layout is not None and work.parts[0].covers(q, k)
    if work.route is not Route.RULE or not work.alike or len(work.runs[0]) > 1:
        return False
    return work.dense[0][0] is None and work.runs[0][0] == (0, q.shape[1], 0, k.shape[1], True)


def _key(current: ForwardContext, layer: int, scores: Scores, q: Tensor, k: Tensor, v: Tensor) -> Hashable:
    form = (q.shape, k.shape, v.shape, q.dtype, q.device)
    return (current.deployed.kind(layer), scores.scale, scores.softcap, *form)
