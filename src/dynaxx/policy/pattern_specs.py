# SPDX-License-Identifier: Apache-2.0
"""Patterns as plain data: one small model per pattern."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, Strict, model_validator

from dynaxx import patterns as p
from dynaxx.policy.document import MOST, Count, Counts, Document, Flag, Int, Positive

MOST_PARTS = 64  # limit on the parts of a union or an intersection

Sides = Annotated[int, Strict(), Field(ge=-1, le=MOST)]


class Spec(Document):
    """Base of the attention rules as data."""

    @model_validator(mode="after")
    def _must_build(self) -> Spec:
        self.build()
        return self

    def build(self) -> Any:
        """Return the object that this data describes."""
        raise NotImplementedError


class Leaf(Spec):
    """Data whose fields are the constructor's arguments."""

    makes: ClassVar[type]

    def build(self) -> Any:
        """Return the object that this data describes."""
        return self.makes(**{name: getattr(self, name) for name in type(self).model_fields if name != "kind"})


class CausalSpec(Leaf):
    """Every key at or before the query."""

    makes = p.Causal
    kind: Literal["causal"] = "causal"


class FullSpec(Leaf):
    """Every pair that causality allows."""

    makes = p.Full
    kind: Literal["full"] = "full"


class SlidingWindowSpec(Leaf):
    """The last `window` keys, the query's own included; or `left` keys before it and `right` keys after it."""

    makes = p.SlidingWindow
    kind: Literal["sliding_window"] = "sliding_window"
    window: Positive | tuple[Sides, Sides]


class DilatedSpec(Leaf):
    """`window` keys, `dilation` tokens apart."""

    makes = p.Dilated
    kind: Literal["dilated"] = "dilated"
    window: Positive
    dilation: Positive


class StridedSpec(Leaf):
    """Keys at distances that are multiples of `stride`."""

    makes = p.Strided
    kind: Literal["strided"] = "strided"
    stride: Positive


class GlobalTokensSpec(Leaf):
    """The first `tokens` keys, or those at the given positions."""

    makes = p.GlobalTokens
    kind: Literal["global_tokens"] = "global_tokens"
    tokens: Count | Counts
    symmetric: Flag = False


class GlobalContentSpec(Leaf):
    """The tokens that match, and `span` tokens after each match; see `content_tokens`."""

    makes = p.GlobalContent
    kind: Literal["global_content"] = "global_content"
    token_ids: Counts = ()
    sequences: Annotated[tuple[Counts, ...], Field(max_length=1024)] = ()
    span: Count = 0
    symmetric: Flag = False


class SinkSpec(Leaf):
    """The first `tokens` keys."""

    makes = p.Sink
    kind: Literal["sink"] = "sink"
    tokens: Count = 4


class LastQueriesSpec(Leaf):
    """The last `queries` queries see every key."""

    makes = p.LastQueries
    kind: Literal["last_queries"] = "last_queries"
    queries: Count


class LocalBlocksSpec(Leaf):
    """The q block's own kv block and those before it, `blocks` in all."""

    makes = p.LocalBlocks
    kind: Literal["local_blocks"] = "local_blocks"
    blocks: Positive


class RandomBlocksSpec(Leaf):
    """`blocks` random kv blocks per q block."""

    makes = p.RandomBlocks
    kind: Literal["random_blocks"] = "random_blocks"
    blocks: Count
    seed: Int = 0


class DocumentsSpec(Leaf):
    """Pairs within one document of a packed sequence."""

    makes = p.Documents
    kind: Literal["documents"] = "documents"
    cu_seqlens: Counts


class AnyOfSpec(Spec):
    """A pair is visible if any part shows it: `a | b`."""

    kind: Literal["any_of"] = "any_of"
    parts: Annotated[tuple[PatternSpec, ...], Field(min_length=2, max_length=MOST_PARTS)]

    def build(self) -> p.Union:
        """Return the object that this data describes."""
        return p.Union(tuple(part.build() for part in self.parts))


class AllOfSpec(Spec):
    """A pair is visible if every part shows it: `a & b`."""

    kind: Literal["all_of"] = "all_of"
    parts: Annotated[tuple[PatternSpec, ...], Field(min_length=2, max_length=MOST_PARTS)]

    def build(self) -> p.Intersection:
        """Return the object that this data describes."""
        return p.Intersection(tuple(part.build() for part in self.parts))


AnyPattern: TypeAlias = (
    CausalSpec
    | FullSpec
    | SlidingWindowSpec
    | DilatedSpec
    | StridedSpec
    | GlobalTokensSpec
    | GlobalContentSpec
    | SinkSpec
    | LastQueriesSpec
    | LocalBlocksSpec
    | RandomBlocksSpec
    | DocumentsSpec
    | AnyOfSpec
    | AllOfSpec
)
PatternSpec: TypeAlias = Annotated[AnyPattern, Field(discriminator="kind")]
for _model in (AnyOfSpec, AllOfSpec):
    _model.model_rebuild()
