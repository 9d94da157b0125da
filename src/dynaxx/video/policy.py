# SPDX-License-Identifier: Apache-2.0
"""`VideoPolicy`: which rule each layer and head of a diffusion transformer follows, in which part of the denoising."""

from __future__ import annotations

import os
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from dynaxx.errors import PolicyError
from dynaxx.layout import as_block_size
from dynaxx.policy import Evidence, LayerPlan, MeasuredOn, ModelFacts, to_spec
from dynaxx.policy.document import Document, Indices, Share, Total
from dynaxx.policy.explaining import explain_errors
from dynaxx.policy.files import load_document
from dynaxx.policy.resolve import per_head, plan_of
from dynaxx.policy.rule import BlockSize, as_indices, head_values
from dynaxx.policy.specs import AttentionRule, AttentionSpec
from dynaxx.video.grid import Order

FORMAT: Literal["dynaxx.video"] = "dynaxx.video"
MAX_RULES = 8192
MAX_RANGES = 16  # parts of the denoising with rules of their own


class VideoRule(Document):
    """One attention rule for some heads of some layers in a part of the denoising. `VideoRule.of` builds one.

    Heads that no rule covers run dense.

    Args:
        layers: "all", or indices.
        heads: "all", or indices.
        steps: first and last share of the denoising steps: (0.25, 1.0) covers all but the first quarter.
        attention: a pattern, selector or hybrid as data, see `dynaxx.policy.to_spec`.
        refresh: the denser rule of refreshes; None if the rule stands alone. See `VideoPolicy`.
    """

    layers: Indices = "all"
    heads: Indices = "all"
    steps: tuple[Share, Share] = (0.0, 1.0)
    attention: AttentionSpec
    refresh: AttentionSpec | None = None

    @classmethod
    def of(
        cls,
        attention: AttentionRule | None,
        *,
        layers: Any = "all",
        heads: Any = "all",
        steps: tuple[float, float] = (0.0, 1.0),
        refresh: AttentionRule | None = None,
    ) -> VideoRule:
        """Return a rule for a pattern, selector or hybrid; None means dense. The class documents the others.

        Raises:
            TypeError: the indices are not "all" or a sequence of integers.
            ValueError: an argument cannot be stored in a policy.
        """
        layers, heads = as_indices("layers", layers), as_indices("heads", heads)
        denser = None if refresh is None else to_spec(refresh)
        try:
            return cls(layers=layers, heads=heads, steps=steps, attention=to_spec(attention), refresh=denser)
        except ValidationError as error:
            raise PolicyError(explain_errors(error)) from None

    @model_validator(mode="after")
    def _steps_ascend(self) -> VideoRule:
        if self.steps[0] >= self.steps[1]:
            raise ValueError(f"`steps` must be a first and a larger last share, got {list(self.steps)}")
        return self

    def applies(self, share: float) -> bool:
        """Return whether the rule covers a step, as a share of all steps from 0.0 to below 1.0."""
        return self.steps[0] <= share < self.steps[1]


class VideoPolicy(Document):
    """A validated policy for a diffusion transformer.

    Read it with `dynaxx.video.load_policy`, write it with `dynaxx.save_policy`, and run it with `dynaxx.apply`.

    Args:
        model: the facts that the model must match; `dynaxx.video.model_facts` returns them.
        block_size: tokens, or (q_block, kv_block), each 16, 32, 64 or 128.
        order: the order of tokens, see `Grid`.
        dense_below: number of tokens below which attention runs dense.
        rules: the rules; heads that no rule covers run dense.
        refresh_every: share of the steps from one refresh to the next, for rules with `refresh`; 0.0 if there are none.
            Each part of the denoising starts with a refresh. All rules of a layer and a part have `refresh`, or none.
        measured_on: the machine and versions of the measurements.
        evidence: the measurements.

    Raises:
        PolicyError: a field is invalid; the message names it and the fix.
    """

    format: Literal["dynaxx.video"] = FORMAT
    version: Literal[1] = 1
    model: ModelFacts
    block_size: BlockSize = 64
    order: Order = "bars"
    dense_below: Total = 0
    rules: Annotated[tuple[VideoRule, ...], Field(max_length=MAX_RULES)] = ()
    refresh_every: Share = 0.0
    measured_on: MeasuredOn | None = None
    evidence: Annotated[tuple[Evidence, ...], Field(max_length=MAX_RULES)] = ()

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise PolicyError(explain_errors(error)) from None

    @model_validator(mode="after")
    def _rules_fit(self) -> VideoPolicy:
        facts, starts = self.model, self.starts
        if len(starts) > MAX_RANGES:
            raise ValueError(f"`rules` must have at most {MAX_RANGES} ranges of steps, got {len(starts)}")
        for index, rule in enumerate(self.rules):
            for name, given, count in (("layers", rule.layers, facts.layers), ("heads", rule.heads, facts.q_heads)):
                if given != "all" and (max(given) >= count or len(set(given)) < len(given)):
                    raise ValueError(f"`rules.{index}.{name}` must be different and below {count}, got {list(given)}")
            heads = _indices(rule.heads, facts.q_heads)
            for name, spec in (("attention", rule.attention), ("refresh", rule.refresh)):
                values = None if spec is None else head_values(spec)
                if values is not None and len(values) != len(heads):
                    raise ValueError(f"`rules.{index}.{name}` must give one budget, or one per head, got {len(values)}")
        if (self.refresh_every > 0) != any(rule.refresh is not None for rule in self.rules):
            raise ValueError(
                f"`refresh_every` must be above 0.0 if and only if a rule has `refresh`, got {self.refresh_every}"
            )
        for start in starts:
            owner: dict[tuple[int, int], int] = {}
            for index, rule in enumerate(self.rules):
                cells = product(_indices(rule.layers, facts.layers), _indices(rule.heads, facts.q_heads))
                for cell in cells if rule.applies(start) else ():
                    if owner.setdefault(cell, index) != index:
                        raise ValueError(
                            f"`rules.{index}` and `rules.{owner[cell]}` both cover layer {cell[0]}, head {cell[1]} at "
                            f"step share {start:g}; remove it from one of them"
                        )
            shared = {(layer, self.rules[index].refresh is not None) for (layer, _), index in owner.items()}
            for layer in range(facts.layers):
                if {(layer, True), (layer, False)} <= shared:
                    raise ValueError(
                        f"`rules` of layer {layer} at step share {start:g} must all have `refresh`, or none"
                    )
        return self

    @property
    def starts(self) -> list[float]:
        """Return the shares of the steps at which other rules start to apply, ascending from 0.0."""
        edges = {0.0, *(edge for rule in self.rules for edge in rule.steps)}
        return sorted(edge for edge in edges if edge < 1.0)

    @property
    def depends_on_step(self) -> bool:
        """Return whether attention differs between steps."""
        return len(self.starts) > 1 or self.refresh_every > 0

    def period(self, share: float) -> tuple[float, int]:
        """Return the start of a step's part of the denoising, and the number of refreshes in it before the last one."""
        start = max(start for start in self.starts if start <= share)
        return start, int((share - start) / self.refresh_every + 1e-6) if self.refresh_every else 0

    def plans(self, share: float, *, refresh: bool = False) -> dict[int, LayerPlan]:
        """Return the plan of every layer that is sparse at a step.

        Args:
            share: the step as its share of all steps.
            refresh: return the plans of refreshes, of the layers that have one.
        """
        facts, block_size = self.model, as_block_size(self.block_size)
        rules: dict[int, list[AttentionRule | None]] = {}
        for rule in self.rules:
            heads, spec = _indices(rule.heads, facts.q_heads), rule.refresh if refresh else rule.attention
            if spec is None:
                continue
            built = per_head(spec.build(), len(heads), head_values(spec) is not None)
            for layer in _indices(rule.layers, facts.layers) if rule.applies(share) else ():
                of_layer = rules.setdefault(layer, [None] * facts.q_heads)
                for head, own in zip(heads, built, strict=True):
                    of_layer[head] = own
        sparse = {
            layer: own for layer, own in sorted(rules.items()) if refresh or any(each is not None for each in own)
        }
        return {layer: plan_of(own, facts.kv_heads, block_size, causal=False) for layer, own in sparse.items()}


def load_policy(path: str | os.PathLike[str]) -> VideoPolicy:
    """Read and validate the file of a `VideoPolicy`. Raises like `dynaxx.load_policy`."""
    return load_document(path, VideoPolicy)


def _indices(given: Indices, count: int) -> tuple[int, ...]:
    return tuple(range(count)) if given == "all" else given
