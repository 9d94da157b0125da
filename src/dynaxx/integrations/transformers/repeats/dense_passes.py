# SPDX-License-Identifier: Apache-2.0
"""Passes whose calls are all dense, repeated by later passes of the same length.

If all calls of a pass were certain to be dense and went to the same attention, later passes of the same length are a
`DensePass`: their calls go to the original attention without a lookup. `DensePasses` also skips the `ForwardContext` of
passes over token ids of the same shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.transformers.masks.lazy import plain_mask
from dynaxx.integrations.transformers.repeats.dense_calls import MOST_OUTCOMES, DenseCall, Outcome
from dynaxx.policy.rollout import ALL

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.forward_context import ForwardContext


class DenseOutcome(NamedTuple):
    """The attention and the outcome of all calls of a dense pass, kept for later passes of the same kind."""

    attention: Callable[..., Any]  # the model's original attention, which reads bool masks
    outcome: Outcome


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
    """Return the calls of a pass, if an earlier one of its kind was kept by `keep_dense_pass`.

    Args:
        current: the context of the pass.
        device: the type of its device.
        seqlen_q: number of new tokens of each row.
        past: number of cached tokens of each row; only whole prompts are known.
    """
    known = current.deployed.dense_passes.get(_pass_key(current, device, seqlen_q)) if past == 0 else None
    return None if known is None else DensePass(known, current.deployed)


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


class _Thread(threading.local):
    """State of a thread."""

    dense: DensePass | None = None  # the pass that runs, if it has no `ForwardContext`


running = _Thread()


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


def _state(deployed: Deployed, ids: Tensor) -> tuple[Any, ...]:
    return deployed, deployed.was_long, deployed.decode_was_long, ids.device
