"""Attention rules as plain data: one small model per pattern, scorer and selector, and conversions both ways.

`to_spec(rule)` writes a `Pattern`, `Selector` or `Hybrid` as data, `spec.build()` makes it again; the round trip is
exact. Data is validated by building the object once, so a document that loads always runs.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from dynaxx import patterns as p
from dynaxx import selection as s

AttentionRule: TypeAlias = p.Pattern | s.Selector | s.Hybrid  # what a head may do; None beside it means dense

Int = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[int, Strict(), Field(ge=1)]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]
NotNegative = Annotated[float, Strict(), Field(ge=0)]
Flag = Annotated[bool, Strict()]
Per = Literal["group", "head"]
Indices = Literal["all"] | Annotated[tuple[Count, ...], Field(min_length=1)]


class Document(BaseModel):
    """Base of everything in a policy file: immutable, no unknown fields, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


class Spec(Document):
    """Base of the attention rules."""

    @model_validator(mode="after")
    def _must_build(self) -> Spec:
        self.build()
        return self

    def build(self) -> Any:
        """The object this data describes."""
        raise NotImplementedError


class _Leaf(Spec):
    """Data whose fields are the constructor's arguments."""

    makes: ClassVar[type]

    def build(self) -> Any:
        return self.makes(**{name: getattr(self, name) for name in type(self).model_fields if name != "kind"})


class Causal(_Leaf):
    """Every key at or before the query."""

    makes = p.Causal
    kind: Literal["causal"] = "causal"


class Full(_Leaf):
    """Every pair (that causality leaves)."""

    makes = p.Full
    kind: Literal["full"] = "full"


class SlidingWindow(_Leaf):
    """`window` keys including the query's own, or (left, right) besides it."""

    makes = p.SlidingWindow
    kind: Literal["sliding_window"] = "sliding_window"
    window: Positive | tuple[Int, Int]


class Dilated(_Leaf):
    """`window` keys, `dilation` tokens apart."""

    makes = p.Dilated
    kind: Literal["dilated"] = "dilated"
    window: Positive
    dilation: Positive


class Strided(_Leaf):
    """Keys at distances that are multiples of `stride`."""

    makes = p.Strided
    kind: Literal["strided"] = "strided"
    stride: Positive


class GlobalTokens(_Leaf):
    """The first `tokens` keys, or those at the given positions."""

    makes = p.GlobalTokens
    kind: Literal["global_tokens"] = "global_tokens"
    tokens: Count | tuple[Count, ...]
    symmetric: Flag = False


class GlobalContent(_Leaf):
    """The tokens that match, and `span` after each match; token ids of the policy's model, see `content_tokens`."""

    makes = p.GlobalContent
    kind: Literal["global_content"] = "global_content"
    token_ids: tuple[Count, ...] = ()
    sequences: tuple[tuple[Count, ...], ...] = ()
    span: Count = 0
    symmetric: Flag = False


class Sink(_Leaf):
    """The first `tokens` keys."""

    makes = p.Sink
    kind: Literal["sink"] = "sink"
    tokens: Count = 4


class LastQueries(_Leaf):
    """The last `queries` queries see everything."""

    makes = p.LastQueries
    kind: Literal["last_queries"] = "last_queries"
    queries: Count


class LocalBlocks(_Leaf):
    """The q block's own kv block and those before it, `blocks` in all."""

    makes = p.LocalBlocks
    kind: Literal["local_blocks"] = "local_blocks"
    blocks: Positive


class RandomBlocks(_Leaf):
    """`blocks` random kv blocks per q block."""

    makes = p.RandomBlocks
    kind: Literal["random_blocks"] = "random_blocks"
    blocks: Count
    seed: Int = 0


class Documents(_Leaf):
    """Pairs within one document of a packed sequence."""

    makes = p.Documents
    kind: Literal["documents"] = "documents"
    cu_seqlens: tuple[Count, ...]


class AnyOf(Spec):
    """A pair is visible if any part shows it: `a | b`."""

    kind: Literal["any_of"] = "any_of"
    parts: Annotated[tuple[PatternSpec, ...], Field(min_length=2)]

    def build(self) -> p.Union:
        return p.Union(tuple(part.build() for part in self.parts))


class AllOf(Spec):
    """A pair is visible if every part shows it: `a & b`."""

    kind: Literal["all_of"] = "all_of"
    parts: Annotated[tuple[PatternSpec, ...], Field(min_length=2)]

    def build(self) -> p.Intersection:
        return p.Intersection(tuple(part.build() for part in self.parts))


class MeanQuery(_Leaf):
    """Score blocks by what a block's mean query pays to each of their keys."""

    makes = s.MeanQuery
    kind: Literal["mean_query"] = "mean_query"
    sharpness: Annotated[float, Strict(), Field(gt=0)] = 0.75


class MeanPool(_Leaf):
    """Score blocks by mean-pooled keys."""

    makes = s.MeanPool
    kind: Literal["mean_pool"] = "mean_pool"
    pool: Positive | None = None


class MinMax(_Leaf):
    """Score blocks by a bound from their smallest and largest keys, or between that and their mean."""

    makes = s.MinMax
    kind: Literal["min_max"] = "min_max"
    bound: Share = 1.0
    pool: Positive | None = None


class LastQueryProbe(_Leaf):
    """Score blocks by the vertical and slash lines that the last queries see."""

    makes = s.LastQueryProbe
    kind: Literal["last_query_probe"] = "last_query_probe"
    queries: Positive = 64


class AntiDiagonal(_Leaf):
    """Score blocks by sums over strided anti-diagonals."""

    makes = s.AntiDiagonal
    kind: Literal["anti_diagonal"] = "anti_diagonal"
    stride: Positive = 16


class SimHash(_Leaf):
    """Score blocks by how often their keys share a random bucket with the queries."""

    makes = s.SimHash
    kind: Literal["sim_hash"] = "sim_hash"
    tables: Positive = 16
    bits: Positive = 6
    seed: Int = 0


class KeyClusters(_Leaf):
    """Score blocks by the clusters of keys nearest to the queries."""

    makes = s.KeyClusters
    kind: Literal["key_clusters"] = "key_clusters"
    clusters: Positive = 128
    nearest: Positive = 32
    iterations: Positive = 4
    seed: Int = 0


class ClusterGlobals(_Leaf):
    """For every query the blocks that hold the most keys of each cluster; one number, or one per head that the rule
    covers."""

    makes = s.ClusterGlobals
    kind: Literal["cluster_globals"] = "cluster_globals"
    per_cluster: Count | tuple[Count, ...] = 1
    clusters: Positive = 32
    iterations: Positive = 4
    seed: Int = 0


class TopK(Spec):
    """The best-scored blocks: a `share` of the causally visible ones, or a number of `blocks`; one value, or one per
    head that the rule covers. JSON does not tell 1 from 1.0, so the two have names."""

    kind: Literal["top_k"] = "top_k"
    share: Share | tuple[Share, ...] | None = None
    blocks: Count | tuple[Count, ...] | None = None
    scorer: ScorerSpec = MeanQuery()
    floor: Count = 0  # q blocks that see fewer kv blocks than this get the share of so many
    per: Per = "group"  # who chooses together: the q heads of a kv head, or each "head" by itself

    @model_validator(mode="after")
    def _one_budget(self) -> TopK:
        if (self.share is None) == (self.blocks is None):
            raise ValueError("give exactly one of `share` and `blocks`")
        return self

    @property
    def values(self) -> Any:
        """The budget, one value or a tuple."""
        return self.share if self.blocks is None else self.blocks

    def build(self) -> s.TopK:
        return s.TopK(
            _floats(self.share) if self.blocks is None else self.blocks, self.scorer.build(), self.floor, self.per
        )


class TopP(Spec):
    """The best-scored blocks up to a share of the estimated attention mass; one value, or one per head."""

    kind: Literal["top_p"] = "top_p"
    mass: Share | tuple[Share, ...]
    scorer: ScorerSpec = MeanQuery()
    per: Per = "group"

    @property
    def values(self) -> Any:
        """The mass, one value or a tuple."""
        return self.mass

    def build(self) -> s.TopP:
        return s.TopP(_floats(self.mass), self.scorer.build(), self.per)


class Threshold(Spec):
    """The blocks whose estimated mass reaches a share of the row's largest, or of an even spread; one value, or one per
    head."""

    kind: Literal["threshold"] = "threshold"
    share: NotNegative | tuple[NotNegative, ...]
    of: Literal["max", "uniform"] = "max"
    scorer: ScorerSpec = MeanQuery()
    per: Per = "group"

    @property
    def values(self) -> Any:
        """The share, one value or a tuple."""
        return self.share

    def build(self) -> s.Threshold:
        return s.Threshold(_floats(self.share), self.of, self.scorer.build(), self.per)


class Hybrid(Spec):
    """A pattern that is always visible, and a selector that spends its budget on the rest."""

    kind: Literal["hybrid"] = "hybrid"
    pattern: PatternSpec
    selector: SelectorSpec

    def build(self) -> s.Hybrid:
        return s.Hybrid(self.pattern.build(), self.selector.build())


class Dense(Spec):
    """Dense attention, said aloud."""

    kind: Literal["dense"] = "dense"

    def build(self) -> None:
        return None


PatternSpec: TypeAlias = Annotated[
    Causal
    | Full
    | SlidingWindow
    | Dilated
    | Strided
    | GlobalTokens
    | GlobalContent
    | Sink
    | LastQueries
    | LocalBlocks
    | RandomBlocks
    | Documents
    | AnyOf
    | AllOf,
    Field(discriminator="kind"),
]
ScorerSpec: TypeAlias = Annotated[
    MeanQuery | MeanPool | MinMax | LastQueryProbe | AntiDiagonal | SimHash | KeyClusters,
    Field(discriminator="kind"),
]
SelectorSpec: TypeAlias = Annotated[TopK | TopP | Threshold | ClusterGlobals, Field(discriminator="kind")]
AttentionSpec: TypeAlias = Annotated[
    Causal
    | Full
    | SlidingWindow
    | Dilated
    | Strided
    | GlobalTokens
    | GlobalContent
    | Sink
    | LastQueries
    | LocalBlocks
    | RandomBlocks
    | Documents
    | AnyOf
    | AllOf
    | TopK
    | TopP
    | Threshold
    | ClusterGlobals
    | Hybrid
    | Dense,
    Field(discriminator="kind"),
]
for _model in (AnyOf, AllOf, TopK, TopP, Threshold, Hybrid):
    _model.model_rebuild()

_LEAVES: tuple[type[_Leaf], ...] = (
    Causal,
    Full,
    SlidingWindow,
    Dilated,
    Strided,
    GlobalTokens,
    GlobalContent,
    Sink,
    LastQueries,
    LocalBlocks,
    RandomBlocks,
    Documents,
    MeanQuery,
    MeanPool,
    MinMax,
    LastQueryProbe,
    AntiDiagonal,
    SimHash,
    KeyClusters,
    ClusterGlobals,
)
_SPEC_OF = {leaf.makes: leaf for leaf in _LEAVES}


def to_spec(rule: AttentionRule | s.Scorer | None) -> Any:
    """Write a pattern, selector, hybrid or scorer as data; None is dense.

    Raises:
        ValueError: one that a policy file has no word for.
    """
    if rule is None:
        return Dense()
    if isinstance(rule, p.Union):
        return AnyOf(parts=tuple(to_spec(part) for part in rule.parts))
    if isinstance(rule, p.Intersection):
        return AllOf(parts=tuple(to_spec(part) for part in rule.parts))
    if isinstance(rule, s.Hybrid):
        return Hybrid(pattern=to_spec(rule.pattern), selector=to_spec(rule.selector))
    if type(rule) is s.TopK:
        return _top_k_spec(rule)
    if type(rule) is s.TopP:
        return TopP(mass=rule.mass, scorer=to_spec(rule.scorer), per=rule.per)
    if type(rule) is s.Threshold:
        return Threshold(share=rule.share, of=rule.of, scorer=to_spec(rule.scorer), per=rule.per)
    leaf = _SPEC_OF.get(type(rule))
    if leaf is None:
        raise ValueError(f"a policy has no word for {rule!r}; use a pattern, selector or hybrid of dynaxx")
    own = {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]
    return leaf(**{name: own[name] for name in leaf.model_fields if name != "kind"})


def _top_k_spec(rule: s.TopK) -> TopK:
    values = rule.budget if isinstance(rule.budget, tuple) else (rule.budget,)
    if len({type(value) for value in values}) > 1:
        raise ValueError(f"a policy rule has shares or block counts, not both, got {rule.budget}; use a rule for each")
    name = "blocks" if isinstance(values[0], int) else "share"
    return TopK(**{name: rule.budget}, scorer=to_spec(rule.scorer), floor=rule.floor, per=rule.per)  # type: ignore[arg-type]


def _floats(value: Any) -> Any:
    return tuple(float(each) for each in value) if isinstance(value, tuple) else float(value or 0.0)
