# SPDX-License-Identifier: Apache-2.0
"""Dense calls that equal an earlier one: single calls of a pass, and whole passes.

A `DenseCall` is the model's original attention for equal layers of one pass. If all calls of a pass are certain to be
dense and were alike, later passes of the same length are a `DensePass`: their calls go to the original attention
without a lookup.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.arguments import sinks_of
from dynaxx.integrations.transformers.lazy_mask import has_own_pattern, plain_mask
from dynaxx.integrations.transformers.repeats.keys import Attended, alike_key, keep, key_of, may_repeat
from dynaxx.policy.rollout import ALL

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.dense_fallback import PlainMask
    from dynaxx.integrations.transformers.forward_context import ForwardContext
    from dynaxx.integrations.transformers.layer import Layer
    from dynaxx.integrations.transformers.planning import CallPlan

MOST_OUTCOMES = 1024


class DenseForm(NamedTuple):
    """The form of a dense call."""

    name: str  # of the attention, "sdpa" or "eager"
    device: str
    seqlen_q: int
    seqlen_k: int


@dataclass(slots=True)
class DenseCall:
    """The model's original attention, in a pass that is certain to be dense."""

    attention: Callable[..., Any]
    mask: Tensor | None  # the mask of transformers, kept so that its id stays unique
    plain: Tensor | None  # the mask that the original attention expects
    dtype: torch.dtype  # dtype of the queries
    outcome: tuple[DenseReason, str]  # reason and phase
    form: DenseForm
    alike: Hashable = None  # see `alike_key`; None if every call of the pass is certain to be dense
    calls: int = 0

    def run(
        self, current: ForwardContext, module: Any, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
    ) -> Attended | None:
        """Attend as in `AttentionInterface`; None if the call must be planned."""
        if q.dtype is not self.dtype or not _sdpa_computes(kwargs):
            return None
        if self.alike is not None and self.alike != alike_key(q, k, kwargs):
            return None
        self.calls += 1
        found: Attended = self.attention(module, q, k, v, self.plain, **kwargs)
        return found

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass."""
        counts.dense(*self.outcome, self.calls)


class DenseOutcome(NamedTuple):
    """The attention and the outcome of all calls of a dense pass, kept for later passes of the same kind."""

    attention: Callable[..., Any]  # the model's original attention, which reads bool masks
    outcome: tuple[DenseReason, str]


class DensePass:
    """All calls of a pass, if they equal those of an earlier pass: each goes to the model's original attention.

    Attributes:
        attention: the model's original attention.
        outcome: reason and phase of the calls.
        calls: number of calls so far.
        deployed: the policy in force when the pass started.
        tokens: number of tokens of the pass, if it has no `ForwardContext`.
        config: the config of its modules, if it has no `ForwardContext`.
    """

    __slots__ = ("_mask", "_plain", "attention", "calls", "config", "deployed", "outcome", "tokens")

    def __init__(self, known: DenseOutcome, deployed: Deployed, tokens: int = 0) -> None:
        self.attention, self.outcome = known
        self.deployed, self.tokens, self.calls = deployed, tokens, 0
        self.config: Any = None
        self._mask: Tensor | None = None  # the last mask of transformers, and what its attention expects
        self._plain: Tensor | None = None

    def plain(self, mask: Tensor) -> Tensor | None:
        """Return the mask that SDPA expects, which calls with the same mask share."""
        if mask is not self._mask:
            self._mask, self._plain = mask, plain_mask(mask, "sdpa", mask.dtype)
        return self._plain


def dense_pass(current: ForwardContext, device: str, seqlen_q: int, past: int) -> DensePass | None:
    """Return the calls of a pass, if an earlier one of its kind was certain to be dense, and its calls were alike.

    Args:
        current: the context of the pass.
        device: the type of its device.
        seqlen_q: number of new tokens of each row.
        past: number of cached tokens of each row; only whole prompts are known.
    """
    known = current.deployed.dense_passes.get(_pass_key(current, device, seqlen_q)) if past == 0 else None
    return None if known is None else DensePass(known, current.deployed)


class DensePasses:
    """Dense passes over whole prompts without a cache, by the shape of their token ids, for passes of the same shape.

    Such a pass needs no `ForwardContext`: its policy, its requests and its calls are known.
    """

    def __init__(self) -> None:
        self._known: dict[torch.Size, tuple[DenseOutcome, tuple[Any, ...]]] = {}

    def keep(self, current: ForwardContext, done: DensePass, ids: Tensor | None, cache: Any) -> None:
        """Keep a pass that ended, if nothing but its shape, the policy and its state decided."""
        rollout = current.deployed.policy.rollout
        every = rollout.flag is None and rollout.share == 1.0
        if ids is None or ids.shape[-1] < 2 or cache is not None or current.blocked is not None:
            return
        if not every or current.choice is not ALL:
            return
        latest = next(reversed(self._known.values()), None)
        if len(self._known) >= MOST_OUTCOMES or (latest is not None and latest[1][0] is not current.deployed):
            self._known = {}  # a former policy must not be kept alive
        self._known[ids.shape] = DenseOutcome(done.attention, done.outcome), _state(current.deployed, ids)

    def again(self, kwargs: dict[str, Any], deployed: Deployed) -> DensePass | None:
        """Return the calls of a pass with these arguments, if it is like one that was kept."""
        ids: Tensor | None = kwargs.get("input_ids")
        if ids is None:
            return None
        known = self._known.get(ids.shape)
        if known is None or known[1] != _state(deployed, ids) or torch.is_grad_enabled():
            return None
        if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None or "write_index" in kwargs:
            return None
        return DensePass(known[0], deployed, ids.numel())


class _Thread(threading.local):
    """State of a thread."""

    dense: DensePass | None = None  # the pass that runs, if it has no `ForwardContext`


running = _Thread()


def _state(deployed: Deployed, ids: Tensor) -> tuple[Any, ...]:
    return deployed, deployed.was_long, deployed.decode_was_long, ids.device


def keep_dense_pass(current: ForwardContext, layers: int) -> None:
    """Keep what all calls of a dense pass over whole prompts had in common, if there were as many as layers."""
    calls = [each for each in current.repeats.values() if isinstance(each, DenseCall)]
    first = calls[0] if calls else None
    if first is None or first.form.name != "sdpa" or first.form.seqlen_q != first.form.seqlen_k:
        return
    same = (first.form, first.attention, first.outcome)
    if sum(x.calls for x in calls if (x.form, x.attention, x.outcome) == same) == layers:
        known = current.deployed.dense_passes
        if len(known) >= MOST_OUTCOMES:
            known.clear()
        known[_pass_key(current, first.form.device, first.form.seqlen_q)] = DenseOutcome(first.attention, first.outcome)


def _pass_key(current: ForwardContext, device: str, seqlen_q: int) -> Hashable:
    deployed = current.deployed
    return current.blocked, deployed.was_long, deployed.decode_was_long, device, seqlen_q


def keep_dense(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    kwargs: Any,
    planned: CallPlan,
) -> None:
    """Keep a call that was planned in a dense pass, and its outcome for later passes."""
    assert planned.reason is not None, "a dense call has a reason"
    assert planned.plain is not None, "its mask was made"
    outcome = planned.reason, planned.phase
    known = current.deployed.outcomes
    if len(known) >= MOST_OUTCOMES:
        known.clear()
    known[_outcome_key(current, layer.index, q, mask, kwargs)] = outcome
    _keep_dense(current, layer, module, q, k, mask, kwargs, planned.plain, outcome)


def keep_dense_alike(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    kwargs: Any,
    planned: CallPlan,
) -> None:
    """Keep a call that was planned dense, for layers with equal calls in a pass whose other calls may be sparse."""
    if planned.reason is None or planned.plain is None or not may_repeat(q, kwargs):
        return
    outcome = planned.reason, planned.phase
    _keep_dense(current, layer, module, q, k, mask, kwargs, planned.plain, outcome, alike=alike_key(q, k, kwargs))


def dense_call(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> DenseCall | None:
    """Return the call of a dense pass, if an earlier pass had the same; None if it must be planned."""
    outcome = current.deployed.outcomes.get(_outcome_key(current, layer.index, q, mask, kwargs))
    if outcome is None or not _sdpa_computes(kwargs):
        return None
    plain = layer.dense.plain(mask, q.dtype, need_eager=False)
    return _keep_dense(current, layer, module, q, k, mask, kwargs, plain, outcome)


def _keep_dense(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    kwargs: Any,
    plain: PlainMask,
    outcome: tuple[DenseReason, str],
    alike: Hashable = None,
) -> DenseCall:
    """Return the model's original attention as a `DenseCall`, kept for equal layers of the pass."""
    form = DenseForm(plain.name, q.device.type, q.shape[2], k.shape[2])
    found = DenseCall(layer.dense.by_name[plain.name], mask, plain.mask, q.dtype, outcome, form, alike)
    keep(current, layer, key_of(current, module, mask, kwargs), found)
    return found


def _outcome_key(current: ForwardContext, index: int, q: Tensor, mask: Tensor | None, kwargs: Any) -> Hashable:
    own = has_own_pattern(mask) or kwargs.get("sliding_window") is not None
    return current.deployed.kind(index), q.shape[2], own, current.blocked


def _sdpa_computes(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("softcap") is None and sinks_of(kwargs) is None
