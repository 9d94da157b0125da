# SPDX-License-Identifier: Apache-2.0
"""`Deployed`: a policy made ready to run, with what it remembers between forward passes."""

from __future__ import annotations

from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.guarding import LiveGuard
from dynaxx.integrations.runtime.routing import DenseReason, LayerRules, PassState
from dynaxx.policy import LayerPlan, Policy, resolve
from dynaxx.policy.decode import DecodePlan, resolve_decode
from dynaxx.policy.guard import Breaker, Level
from dynaxx.policy.length import is_long
from dynaxx.policy.resolve import selection_sources
from dynaxx.policy.rollout import open_feature
from dynaxx.telemetry import Recorder

WATCHED = ("model", "block_size", "rules", "reuse", "guard", "drift", "reference")  # fields that a guard depends on
NO_RULES = LayerRules()


class Deployed:
    """A policy made ready to run, with what it remembers between passes. Replaced as a whole.

    Args:
        policy: the policy.
        numbers: where to count.
        background: what runs the guard's measurements.
        before: the policy that this one replaces. Its guard goes on where it watched the same rules.
        native: whether the model's own pattern may run on dynaxx's kernels where no rule does.
        window: keys on each side that an encoder's layers see, where the caller asked for a window.
        head_share: (rank, ranks) where tensor parallelism gives this process some of the heads.

    Attributes:
        plans: by layer, what its heads do in prefill; other layers have no prefill rule.
        sources: by layer, the layer whose selection it uses, where the policy reuses any.
        decode: by layer, what it does in decoding steps.
        rules: by layer, what `route` needs to know of both.
        breakers: by layer, whether failures made it rest.
        guard: what watches it; None if the policy has no guard, or this process some of the heads only.
        was_long, decode_was_long: whether the last sequence ran sparse, for lengths between the policy's two borders.
    """

    def __init__(
        self,
        policy: Policy,
        numbers: Recorder,
        background: Background,
        before: Deployed | None = None,
        *,
        native: bool = False,
        window: tuple[int, int] | None = None,
        head_share: tuple[int, int] = (0, 1),
    ) -> None:
        self.policy = policy
        self.native, self.window = native, window
        self.plans: dict[int, LayerPlan] = {i: plan.shard(*head_share) for i, plan in resolve(policy).items()}
        self.sources: dict[int, int] = selection_sources(self.plans, policy.reuse)
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
        self._kinds: dict[object, int] = {}
        self.kinds = {layer: self._kind_of(layer) for layer in self.rules}

    def rules_of(self, layer: int) -> LayerRules:
        """Return what the policy says about a layer."""
        return self.rules.get(layer, NO_RULES)

    def kind(self, layer: int) -> int:
        """Return a number that layers share whose calls are decided and planned alike; 0 for layers without a rule."""
        return self.kinds.get(layer, 0)

    def state(self, layer: int, blocked: DenseReason | None) -> PassState:
        """Return what holds for a layer in a pass that is `blocked` as a whole, or not."""
        if blocked is None and not self.policy.rollout.covers_layer(layer):
            blocked = DenseReason.LAYER_LEFT_OUT
        return PassState(blocked, self.was_long, self.decode_was_long)

    def interruption(
        self,
        layer: int,
        *,
        native: bool = False,
        window: tuple[int, int] | None = None,
    ) -> DenseReason | None:
        """Why a call that would run on dynaxx's kernels must not: the guard, or failures before. Asked once per call.

        Args:
            native: the call runs the model's own pattern, which no guard watches.
        """
        guard = self.guard
        if guard is not None and not native and layer in self.plans and guard.level(layer) == Level.DENSE:
            return DenseReason.GUARD
        return DenseReason.RESTING if self.breakers[layer].resting() else None

    def remember_length(self, seqlen_k: int, *, decodes: bool = False) -> None:
        """Keep on which side of the borders a sequence was, for sequences between them."""
        policy = self.policy
        if decodes:
            self.decode_was_long = is_long(seqlen_k, *policy.decode_borders, before=self.decode_was_long)
        else:
            self.was_long = is_long(seqlen_k, policy.dense_below, policy.sparse_from, before=self.was_long)

    def reset(self) -> None:
        """Forget what passes before left."""
        self.was_long = self.decode_was_long = False

    def _rules_of(self, layer: int) -> LayerRules:
        plan, policy = self.plans.get(layer), self.policy
        return LayerRules(
            None if plan is None else plan.block_size[0],
            layer in self.decode,
            (policy.dense_below, policy.sparse_from),
            policy.decode_borders,
            policy.rollout,
        )

    def _kind_of(self, layer: int) -> int:
        key = (self.plans.get(layer), self.decode.get(layer), self.policy.rollout.covers_layer(layer))
        return self._kinds.setdefault(key, len(self._kinds) + 1)
