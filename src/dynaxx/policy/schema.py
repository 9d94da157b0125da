# SPDX-License-Identifier: Apache-2.0
"""The policy document: what runs where, from which length, with which tolerance, and the evidence it rests on.

A policy is pure data. Unknown fields are refused, so every field of a file has an effect. A policy that validates can
be run.
"""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from dynaxx.errors import PolicyError
from dynaxx.layout import as_block_size
from dynaxx.policy.document import Document, Positive, Total
from dynaxx.policy.drift import Drift
from dynaxx.policy.explaining import explain_errors
from dynaxx.policy.facts import Evidence, MeasuredOn, ModelFacts, Tolerances
from dynaxx.policy.guard import Guard
from dynaxx.policy.profile import Profile
from dynaxx.policy.rollout import Rollout
from dynaxx.policy.rule import BlockSize, Rule, as_page_size, head_values

FORMAT: Literal["dynaxx.policy"] = "dynaxx.policy"
VERSION: Literal[1] = 1
MAX_RULES = 16_384


class Policy(Document):
    """A validated, versioned policy.

    Read it with `load_policy`, write it with `save_policy`, and run it with `dynaxx.apply`.

    A sequence of fewer than `dense_below` keys runs dense, and one of at least `sparse_from` keys runs sparse. A
    sequence in between runs like the one before it (the first one dense), so that lengths around the border do not
    switch back and forth. Without `sparse_from` there is one border.

    Args:
        model: the facts that the model must match.
        block_size: tokens, or (q_block, kv_block), each 16, 32, 64 or 128, for rules without a block size.
        dense_below: number of keys below which a sequence runs dense; measured by `dynaxx tune`.
        sparse_from: number of keys from which a sequence runs sparse; measured by `dynaxx tune`.
        decode_dense_below: number of keys below which decoding steps run dense; None uses the two borders above.
        rules: the rules of heads and layers; heads that no rule covers run dense.
        reuse: always 1; policies of 0.1 could share selections between layers, and `load_policy` drops that.
        shared: always empty, for the same reason.
        rollout: the requests that the policy applies to.
        guard: the measurements on running traffic and the reaction to them; None measures nothing.
        drift: the criterion for drift from `reference`.
        tolerances: the limits that `dynaxx validate` checks.
        measured_on: the machine and versions of the measurements.
        evidence: the measurements.
        reference: the attention profile of the tuning traffic; without it drift is not checked.

    Raises:
        PolicyError: a field is invalid; the message names it and the fix.
    """

    format: Literal["dynaxx.policy"] = FORMAT
    version: Literal[1] = VERSION
    model: ModelFacts
    block_size: BlockSize = 64
    dense_below: Total = 0
    sparse_from: Total | None = None
    decode_dense_below: Total | None = None
    rules: Annotated[tuple[Rule, ...], Field(max_length=MAX_RULES)] = ()
    reuse: Annotated[Positive, Field(le=1)] = 1
    shared: tuple[()] = ()
    rollout: Rollout = Rollout()
    guard: Guard | None = None
    drift: Drift = Drift()
    tolerances: Tolerances = Tolerances()
    measured_on: MeasuredOn | None = None
    evidence: Annotated[tuple[Evidence, ...], Field(max_length=MAX_RULES)] = ()
    reference: Profile | None = None

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise PolicyError(explain_errors(error)) from None

    @property
    def border(self) -> int:
        """The number of keys from which a sequence runs sparse, whatever ran before it."""
        return self.dense_below if self.sparse_from is None else self.sparse_from

    @property
    def decode_borders(self) -> tuple[int, int | None]:
        """The borders `dense_below` and `sparse_from` of decoding steps."""
        own = self.decode_dense_below
        return (self.dense_below, self.sparse_from) if own is None else (own, None)

    def replace(self, **changes: Any) -> Policy:
        """Return a copy with some fields changed, after validation."""
        return Policy(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    @model_validator(mode="after")
    def _borders_in_order(self) -> Policy:
        if self.sparse_from is not None and self.sparse_from < self.dense_below:
            raise ValueError(
                f"`sparse_from` must be >= `dense_below` = {self.dense_below}, got {self.sparse_from}; "
                "leave it out for one border"
            )
        return self

    @model_validator(mode="after")
    def _reference_fits(self) -> Policy:
        for each in () if self.reference is None else self.reference.layers:
            if each.layer >= self.model.layers or len(each.recall) != self.model.q_heads:
                raise ValueError(
                    f"`reference` must have {self.model.q_heads} q heads and layers below {self.model.layers}, got "
                    f"{len(each.recall)} in layer {each.layer}; record it again with dynaxx retune --record"
                )
        return self

    @model_validator(mode="after")
    def _rules_fit(self) -> Policy:
        owner: dict[tuple[str, int, int], int] = {}  # rule of each phase, layer and head
        block_of: dict[tuple[str, int], tuple[int, tuple[int, int]]] = {}  # rule and block size of each phase and layer
        for index, rule in enumerate(self.rules):
            layers, heads = rule.layer_list(self.model.layers), rule.head_list(self.model.q_heads)
            _check_indices(f"rules.{index}.layers", "layers", layers, self.model.layers)
            _check_indices(f"rules.{index}.heads", "heads", heads, self.model.q_heads)
            per_head = head_values(rule.attention)
            if per_head is not None and len(per_head) != len(heads):
                raise ValueError(
                    f"`rules.{index}.attention` must give one budget, or one per covered head ({len(heads)}), "
                    f"got {len(per_head)}"
                )
            stated = self.block_size if rule.block_size is None else rule.block_size
            page_size = as_page_size(stated)
            block_size = as_block_size(stated) if rule.phase == "prefill" else (page_size, page_size)
            for layer in layers:
                first, other = block_of.setdefault((rule.phase, layer), (index, block_size))
                if other != block_size:
                    raise ValueError(
                        f"`rules.{index}.block_size` must be {other} in layer {layer}, as in `rules.{first}`: "
                        "all heads of a layer share one block size"
                    )
            for layer, head in product(layers, heads):
                before = owner.setdefault((rule.phase, layer, head), index)
                if before != index:
                    raise ValueError(
                        f"`rules.{index}` and `rules.{before}` both cover layer {layer}, head {head}; "
                        "remove it from one of them"
                    )
        return self


def _check_indices(field: str, name: str, given: tuple[int, ...], count: int) -> None:
    """Raise ValueError if indices of layers or heads do not exist in the model, or repeat."""
    outside = [each for each in given if each >= count]
    if outside:
        raise ValueError(f"`{field}` must be below {count}, the model's number of {name}, got {outside[0]}")
    if len(set(given)) != len(given):
        raise ValueError(f"`{field}` must not repeat an index, got {list(given)}")
