"""A policy at work in a model: what starts its passes, counts them, and takes it off again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dynaxx.integrations.counts import Counts
from dynaxx.integrations.decoder import DENSE, NAME, Decoder, implementation
from dynaxx.integrations.layer import LAYERS, Layer
from dynaxx.integrations.passes import Deployed, Pass, PassHooks
from dynaxx.integrations.request import UNKNOWN, TokenReader
from dynaxx.layout import BlockLayout
from dynaxx.policy import LayerPlan, Policy

Watcher = Callable[[int, BlockLayout], None]


class Handle:
    """A policy at work in a model. Also a context manager that removes it.

    Attributes:
        counts: what layer calls did.
        watchers: see `watch`.
    """

    def __init__(self, policy: Policy, decoder: Decoder) -> None:
        self.counts = Counts()
        self.watchers: list[Watcher] = []
        self._deployed = Deployed(policy)
        self._owner = weakref.ref(decoder.owner)  # the registry of layers must not keep a model alive
        self._layers = weakref.WeakKeyDictionary({m: Layer(self, index, m) for index, m in decoder.layers.items()})
        LAYERS.update(self._layers)
        needs_tokens = any(plan.needs_tokens for plan in self._deployed.plans.values())
        self._tokens = TokenReader() if needs_tokens else None
        self._hooks = PassHooks(decoder.body, self)
        self._own = threading.local()  # the pass of each thread in a model whose decoder cannot hand it down

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._deployed.policy

    @property
    def plans(self) -> dict[int, LayerPlan]:
        """By layer, what its heads do in prefill; layers that are not in it are dense."""
        return self._deployed.plans

    @property
    def active(self) -> bool:
        """Whether the policy is still applied."""
        return any(m in LAYERS and implementation(m) == NAME for m in self._layers)

    def start_pass(self, arguments: dict[str, Any]) -> Pass:
        """Decide what holds for a forward pass, from the decoder's own arguments by name."""
        return Pass(self._deployed, UNKNOWN if self._tokens is None else self._tokens.read(arguments))

    def end_pass(self, done: Pass, cache: Any) -> None:
        """Keep for later passes over `cache` what this one knew."""
        if self._tokens is not None:
            self._tokens.remember(cache, done.tokens)

    def unannounced_pass(self, layer: int) -> Pass:
        """The pass that this thread is in, where the decoder hands none down: layers come in ascending order."""
        before = getattr(self._own, "current", None)
        if before is None or layer <= before[0]:
            before = (layer, Pass(self._deployed))
        self._own.current = (layer, before[1])
        return before[1]

    def remove(self) -> None:
        """Give the model back exactly the attention it had. More calls do nothing."""
        configs = {id(module.config) for module in self._layers}
        for module in self._layers:
            LAYERS.pop(module, None)
        self._hooks.remove()
        shared = any(id(module.config) in configs for module in LAYERS)  # two models of one config object
        owner = self._owner()
        if owner is not None and owner.config._attn_implementation == NAME and not shared:
            owner.set_attn_implementation(DENSE)

    def stats(self) -> dict[str, Any]:
        """Count layer calls since `apply` or `reset_stats`.

        Returns:
            "sparse_calls": calls with at least one sparse sequence; "dense_calls": the others, by reason;
            "dense_sequences": sequences that ran dense beside sparse ones of the same call, by reason.
        """
        return self.counts.to_dict()

    def reset_stats(self) -> None:
        """Start counting from zero, and forget which side of the length border the last sequence was on."""
        self.counts.reset()
        self._deployed.reset()

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Call `watcher(layer, layout)` for every layout that runs within the block: to measure density or recall."""
        self.watchers.append(watcher)
        try:
            yield
        finally:
            self.watchers.remove(watcher)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        facts = self.policy.model
        state = "active" if self.active else "removed"
        return f"<dynaxx policy on {facts.model_type}: {len(self.plans)} of {facts.layers} layers sparse, {state}>"
