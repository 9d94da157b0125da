# SPDX-License-Identifier: Apache-2.0
"""`Rule`: the attention rule of some heads of some layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ValidationError, model_validator

from dynaxx.arguments import as_integer
from dynaxx.errors import PolicyError
from dynaxx.layout import as_block_size
from dynaxx.policy.document import Document, Indices, Int
from dynaxx.policy.explaining import explain_errors
from dynaxx.policy.specs import AttentionRule, AttentionSpec, Spec, budget_of, parts, to_spec
from dynaxx.selection.pages import PageBudget

SMALLEST_PAGE = 8  # tokens; pages of decode rules may be smaller than the blocks of a layout


def as_page_size(block_size: int | tuple[int, int]) -> int:
    """Return the tokens per page for the block size of a decode rule: its kv_block, or 8 for a block size of 8."""
    return SMALLEST_PAGE if block_size == SMALLEST_PAGE else as_block_size(block_size)[1]


def _checked_block_size(value: int | tuple[int, int] | None) -> int | tuple[int, int] | None:
    if value is not None:
        as_block_size(value)
    return value


def _checked_page_size(value: int | tuple[int, int] | None) -> int | tuple[int, int] | None:
    if value is not None:
        as_page_size(value)
    return value


Phase = Literal["prefill", "decode"]
BlockSize = Annotated[Int | tuple[Int, Int], AfterValidator(_checked_block_size)]
BlockOrPageSize = Annotated[Int | tuple[Int, Int], AfterValidator(_checked_page_size)]


class Rule(Document):
    """One attention rule for some heads of some layers. `Rule.of` builds one from a pattern, selector or hybrid.

    Heads that no rule covers run dense.

    Args:
        layers: "all", or indices.
        heads: "all", or indices of q heads.
        phase: "prefill" or "decode". In decode rules blocks are pages, and `attention` may combine sinks, windows, and
            TopK with MeanQuery, MeanPool or MinMax.
        attention: a pattern, selector or hybrid as data, see `dynaxx.policy.to_spec`.
        block_size: tokens, or (q_block, kv_block); None means the policy's. Decode rules may have pages of 8.
    """

    layers: Indices = "all"
    heads: Indices = "all"
    phase: Phase = "prefill"
    attention: AttentionSpec
    block_size: BlockOrPageSize | None = None

    @classmethod
    def of(
        cls,
        attention: AttentionRule | None,
        *,
        layers: Any = "all",
        heads: Any = "all",
        block_size: int | tuple[int, int] | None = None,
        phase: Phase = "prefill",
    ) -> Rule:
        """Return a rule for a pattern, selector or hybrid.

        Args:
            attention: the pattern, selector or hybrid; None means dense. A selector's budget may be a tuple of one
                value per head of `heads`, in that order.
            layers: "all", or a sequence of indices.
            heads: "all", or a sequence of indices of q heads.
            block_size: tokens, or (q_block, kv_block); None means the policy's. Decode rules may have pages of 8.
            phase: "prefill" for prompts and chunks of them; "decode" for a few queries over a cache, where
                `PageBudget.of` must be able to express `attention`.

        Raises:
            TypeError: the indices are not "all" or a sequence of integers.
            ValueError: the indices, the block size or the object cannot be stored in a policy.
        """
        layers, heads = as_indices("layers", layers), as_indices("heads", heads)
        try:
            return cls(layers=layers, heads=heads, phase=phase, attention=to_spec(attention), block_size=block_size)
        except ValidationError as error:
            raise PolicyError(explain_errors(error)) from None

    @model_validator(mode="after")
    def _decodes(self) -> Rule:
        rule = self.attention.build() if self.phase == "decode" else None
        if rule is not None:
            PageBudget.of(rule)
        if self.phase == "prefill" and self.block_size is not None:
            as_block_size(self.block_size)
        return self

    def head_list(self, q_heads: int) -> tuple[int, ...]:
        """Return the q heads that the rule covers, in the rule's order."""
        return tuple(range(q_heads)) if self.heads == "all" else self.heads

    def layer_list(self, layers: int) -> tuple[int, ...]:
        """Return the layers that the rule covers."""
        return tuple(range(layers)) if self.layers == "all" else self.layers


def as_indices(name: str, value: Any) -> Any:
    """Return indices of any integer type as a tuple of `int`, or a string itself.

    Raises:
        TypeError: the value is neither a string nor a sequence of integers.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Iterable):
        raise TypeError(f"`{name}` must be 'all' or a sequence of indices such as [0], got {value!r}")
    return tuple(as_integer(name, index) for index in value)


def head_values(attention: Spec) -> tuple[float, ...] | None:
    """Return the per-head budgets of an attention spec, or None if it has a single budget or none."""
    _, selector = parts(attention.build())
    values = None if selector is None else budget_of(selector)
    return values if isinstance(values, tuple) else None
