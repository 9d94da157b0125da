# SPDX-License-Identifier: Apache-2.0
"""`Deployed`: a policy that is ready to run, with its state between forward passes."""

from __future__ import annotations

from collections.abc import Hashable

from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.guarding import LiveGuard
from dynaxx.integrations.runtime.routing import DenseReason, LayerRules, PassState
from dynaxx.ops.prepared.layer import Prepared
from dynaxx.ops.prepared.step import PreparedStep
from dynaxx.policy import LayerPlan, Policy, resolve
from dynaxx.policy.guard import Breaker, Level
from dynaxx.policy.resolve import DecodePlan, resolve_decode
from dynaxx.policy.rollout import is_long, open_feature
from dynaxx.telemetry import Recorder

WATCHED = (
    "model",
    "block_size",
    "rules",
    "guard",
    "drift",
    "reference",
)  # fields on which a guard depends
NO_RULES = LayerRules()


class Deployed:
    """A policy that is ready to run, with its state between passes. A new policy replaces the whole object.

    Args:
        policy: the policy.
        numbers: the recorder.
        background: the thread for the guard's measurements.
        before: the policy that this one replaces. Its guard continues if it watched the same rules.
        own_pattern: whether the model's own pattern may run on dynaxx's kernels if no rule applies.
        window: keys that an encoder's layers see on each side, if the caller asked for a window.
        head_share: (rank, ranks) if tensor parallelism gives this process only some heads.

    Attributes:
        plans: prefill rules by layer; other layers have no prefill rule.
        flags: the application's flag service, if the policy's rollout names a flag.
        decode: decode rules by layer.
        rules: the inputs of `route` by layer.
        kinds: a number by layer with a rule, equal for layers with equal routing and plans.
        breakers: by layer, whether failures made it rest.
        guard: the guard; None if the policy has none, or if this process has only some heads.
        was_long: whether the last sequence ran sparse, for lengths between the policy's two borders.
        decode_was_long: the same for decoding steps.
        prepared: prepared calls of its rules, by the signature of the call.
        steps: the same for decoding steps.
    """

    def __init__(
        self,
        policy: Policy,
        numbers: Recorder,
        background: Background,
        before: Deployed | None = None,
        *,
        own_pattern: bool = False,
        window: tuple[int, int] | None = None,
        head_share: tuple[int, int] = (0, 1),
    ) -> None:
        self.policy = policy
        self.own_pattern, self.window = own_pattern, window
        self.plans: dict[int, LayerPlan] = {i: plan.shard(*head_share) for i, plan in resolve(policy).items()}
        self.decode: dict[int, DecodePlan] = {i: plan.shard(*head_share) for i, plan in resolve_decode(policy).items()}
        self.rules = {layer: self._rules_of(layer) for layer in sorted({*self.plans, *self.decode})}
        self.breakers = {layer: Breaker() for layer in range(policy.model.layers)}
        self.was_long = self.decode_was_long = False
        self.guard: LiveGuard | None = None
        if policy.guard and self.plans and head_share[1] == 1:
            same = before is not None and all(getattr(before.policy, name) == getattr(policy, name) for name in WATCHED)
            kept = before.guard if before is not None and same else None
            self.guard = kept or LiveGuard(policy, self.plans, numbers, background)
        self.flags = open_feature() if policy.rollout.flag is not None else None
        self.prepared: dict[Hashable, Prepared] = {}
        self.steps: dict[Hashable, PreparedStep] = {}
        self._kinds: dict[object, int] = {}
        self.kinds = {layer: self._kind_of(layer) for layer in self.rules}

    def rules_of(self, layer: int) -> LayerRules:
        """Return the policy's rules for a layer."""
        return self.rules.get(layer, NO_RULES)

    def kind(self, layer: int) -> int:
        """Return a number that is equal for layers with equal routing and plans, 0 for layers without a rule."""
        return self.kinds.get(layer, 0)

    def state(self, layer: int, blocked: DenseReason | None) -> PassState:
        """Return the state of a layer in a pass, which may be `blocked` as a whole."""
        if blocked is None and not self.policy.rollout.covers_layer(layer):
            blocked = DenseReason.LAYER_LEFT_OUT
        return PassState(blocked, self.was_long, self.decode_was_long)

    def interruption(self, layer: int, *, own_pattern: bool = False) -> DenseReason | None:
        """Return why a call must not run on dynaxx's kernels (the guard, or previous failures), or None.

        Call it once per call, since it counts the calls of a resting layer.

        Args:
            layer: index of the layer.
            own_pattern: whether the call runs the model's own pattern, which the guard does not watch.
        """
        guard = self.guard
        if guard is not None and not own_pattern and layer in self.plans and guard.level(layer) == Level.DENSE:
            return DenseReason.GUARD
        return DenseReason.RESTING if self.breakers[layer].resting() else None

    def remember_length(self, seqlen_k: int, *, decodes: bool = False) -> None:
        """Store on which side of the borders a sequence was, for later sequences between them."""
        policy = self.policy
        if decodes:
            self.decode_was_long = is_long(seqlen_k, *policy.decode_borders, before=self.decode_was_long)
        else:
            self.was_long = is_long(seqlen_k, policy.dense_below, policy.sparse_from, before=self.was_long)

    def reset(self) -> None:
        """Reset the state of previous passes."""
        self.was_long = self.decode_was_long = False

    def _rules_of(self, layer: int) -> LayerRules:
        plan, policy = self.plans.get(layer), self.policy
        return LayerRules(
            None if plan is None else 1 if plan.is_static else plan.block_size[0],
            layer in self.decode,
            (policy.dense_below, policy.sparse_from),
            policy.decode_borders,
            policy.rollout,
        )

    def _kind_of(self, layer: int) -> int:
        key = (self.plans.get(layer), self.decode.get(layer), self.policy.rollout.covers_layer(layer))
        return self._kinds.setdefault(key, len(self._kinds) + 1)
