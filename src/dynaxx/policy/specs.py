# SPDX-License-Identifier: Apache-2.0
"""Attention rules as plain data: one small model per pattern, scorer and selector, and conversions both ways.

`to_spec(rule)` converts a `Pattern`, `Selector` or `Hybrid` to data, and `spec.build()` builds it again. The round trip
is exact. Validation builds the object once, so that a document that loads always runs.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, Strict, model_validator

from dynaxx import patterns as p
from dynaxx import selection as s
from dynaxx.policy.document import MOST_LISTED, Count, Counts, Int, NotNegative, Positive, Share
from dynaxx.policy.pattern_specs import AllOfSpec, AnyOfSpec, AnyPattern, Leaf, PatternSpec, Spec

AttentionRule: TypeAlias = p.Pattern | s.Selector | s.Hybrid  # the rule of a head; None means dense

Per = Literal["group", "head"]
Shares = Annotated[tuple[Share, ...], Field(max_length=MOST_LISTED)]
Iterations = Annotated[int, Strict(), Field(ge=1, le=256)]
Clusters = Annotated[int, Strict(), Field(ge=1, le=4096)]
Tables = Annotated[int, Strict(), Field(ge=1, le=256)]
Bits = Annotated[int, Strict(), Field(ge=1, le=16)]  # 2^bits buckets


class MeanQuerySpec(Leaf):
    """Score blocks by the attention of a q block's mean query to each of their keys."""

    makes = s.MeanQuery
    kind: Literal["mean_query"] = "mean_query"
    sharpness: Annotated[float, Strict(), Field(gt=0, le=1000)] = 0.75
    precision: Literal["full", "int8"] = "full"


class TileQueriesSpec(Leaf):
    """Score blocks by the attention of the mean queries of a q block's tiles to each of their keys."""

    makes = s.TileQueries
    kind: Literal["tile_queries"] = "tile_queries"
    tokens: Positive = 16
    sharpness: Annotated[float, Strict(), Field(gt=0, le=1000)] = 0.75


class TwoStageSpec(Spec):
    """Score blocks in two stages: bounds rule out most blocks, and `fine` ranks the rest.

    The second stage gets a `share` of the visible blocks, or a number of `blocks`.
    """

    kind: Literal["two_stage"] = "two_stage"
    share: Share | None = None
    blocks: Count | None = None
    fine: MeanQuerySpec = MeanQuerySpec()
    panel: Positive = 32

    @model_validator(mode="after")
    def _one_keep(self) -> TwoStageSpec:
        if (self.share is None) == (self.blocks is None):
            raise ValueError("give exactly one of `share` and `blocks`")
        self.build()
        return self

    def build(self) -> s.TwoStage:
        """Return the object that this data describes."""
        return s.TwoStage(
            float(self.share or 0.0) if self.blocks is None else self.blocks, self.fine.build(), self.panel
        )


class MeanPoolSpec(Leaf):
    """Score blocks by mean-pooled keys."""

    makes = s.MeanPool
    kind: Literal["mean_pool"] = "mean_pool"
    pool: Positive | None = None


class MinMaxSpec(Leaf):
    """Score blocks by a bound from the minima and maxima of their keys, or by its mixture with the mean key."""

    makes = s.MinMax
    kind: Literal["min_max"] = "min_max"
    bound: Share = 1.0
    pool: Positive | None = None


class LastQueryProbeSpec(Leaf):
    """Score blocks by the vertical and slash lines that the last queries see."""

    makes = s.LastQueryProbe
    kind: Literal["last_query_probe"] = "last_query_probe"
    queries: Positive = 64


class AntiDiagonalSpec(Leaf):
    """Score blocks by sums over strided anti-diagonals."""

    makes = s.AntiDiagonal
    kind: Literal["anti_diagonal"] = "anti_diagonal"
    stride: Positive = 16


class SimHashSpec(Leaf):
    """Score blocks by how often their keys share a random bucket with the queries."""

    makes = s.SimHash
    kind: Literal["sim_hash"] = "sim_hash"
    tables: Tables = 16
    bits: Bits = 6
    seed: Int = 0


class KeyClustersSpec(Leaf):
    """Score blocks by the clusters of keys nearest to the queries."""

    makes = s.KeyClusters
    kind: Literal["key_clusters"] = "key_clusters"
    clusters: Clusters = 128
    nearest: Clusters = 32
    iterations: Iterations = 4
    seed: Int = 0


class ClusterGlobalsSpec(Leaf):
    """Select, for every query, the blocks that hold most keys of each cluster.

    `per_cluster` is one number, or one per head that the rule covers.
    """

    makes = s.ClusterGlobals
    kind: Literal["cluster_globals"] = "cluster_globals"
    per_cluster: Count | Counts = 1
    clusters: Clusters = 32
    iterations: Iterations = 4
    seed: Int = 0


class TopKSpec(Spec):
    """Select the best-scored blocks: a `share` of the causally visible ones, or a number of `blocks`.

    Either is one value, or one per head that the rule covers. They have different names because JSON does not
    distinguish 1 from 1.0.
    """

    kind: Literal["top_k"] = "top_k"
    share: Share | Shares | None = None
    blocks: Count | Counts | None = None
    scorer: ScorerSpec = MeanQuerySpec()
    floor: Count = 0  # q blocks that see fewer kv blocks than this get the share of this many
    per: Per = "group"  # "group": the q heads of a kv head choose together; "head": each chooses alone

    @model_validator(mode="after")
    def _one_budget(self) -> TopKSpec:
        if (self.share is None) == (self.blocks is None):
            raise ValueError("give exactly one of `share` and `blocks`")
        return self

    @property
    def values(self) -> Any:
        """The budget: one value, or a tuple of one per head."""
        return self.share if self.blocks is None else self.blocks

    def build(self) -> s.TopK:
        """Return the object that this data describes."""
        return s.TopK(
            _floats(self.share) if self.blocks is None else self.blocks, self.scorer.build(), self.floor, self.per
        )


class TopPSpec(Spec):
    """Select the best-scored blocks up to a share of the estimated attention mass; one value, or one per head."""

    kind: Literal["top_p"] = "top_p"
    mass: Share | Shares
    scorer: ScorerSpec = MeanQuerySpec()
    per: Per = "group"

    @property
    def values(self) -> Any:
        """The mass: one value, or a tuple of one per head."""
        return self.mass

    def build(self) -> s.TopP:
        """Return the object that this data describes."""
        return s.TopP(_floats(self.mass), self.scorer.build(), self.per)


class ThresholdSpec(Spec):
    """Select the blocks whose estimated mass reaches a share of the row's largest mass, or of an even spread.

    The share is one value, or one per head.
    """

    kind: Literal["threshold"] = "threshold"
    share: NotNegative | Annotated[tuple[NotNegative, ...], Field(max_length=MOST_LISTED)]
    of: Literal["max", "uniform"] = "max"
    scorer: ScorerSpec = MeanQuerySpec()
    per: Per = "group"

    @property
    def values(self) -> Any:
        """The share: one value, or a tuple of one per head."""
        return self.share

    def build(self) -> s.Threshold:
        """Return the object that this data describes."""
        return s.Threshold(_floats(self.share), self.of, self.scorer.build(), self.per)


class HybridSpec(Spec):
    """A pattern that is always visible, and a selector that spends its budget on the rest."""

    kind: Literal["hybrid"] = "hybrid"
    pattern: PatternSpec
    selector: SelectorSpec

    def build(self) -> s.Hybrid:
        """Return the object that this data describes."""
        return s.Hybrid(self.pattern.build(), self.selector.build())


class DenseSpec(Spec):
    """Dense attention, stated explicitly."""

    kind: Literal["dense"] = "dense"

    def build(self) -> None:
        """Return the object that this data describes."""
        return None


ScorerSpec: TypeAlias = Annotated[
    MeanQuerySpec
    | TileQueriesSpec
    | TwoStageSpec
    | MeanPoolSpec
    | MinMaxSpec
    | LastQueryProbeSpec
    | AntiDiagonalSpec
    | SimHashSpec
    | KeyClustersSpec,
    Field(discriminator="kind"),
]
AnySelector: TypeAlias = TopKSpec | TopPSpec | ThresholdSpec | ClusterGlobalsSpec
SelectorSpec: TypeAlias = Annotated[AnySelector, Field(discriminator="kind")]
AttentionSpec: TypeAlias = Annotated[AnyPattern | AnySelector | HybridSpec | DenseSpec, Field(discriminator="kind")]
for _model in (TopKSpec, TopPSpec, ThresholdSpec, HybridSpec):
    _model.model_rebuild()

_SPEC_OF = {leaf.makes: leaf for leaf in Leaf.__subclasses__()}


def to_spec(rule: AttentionRule | s.Scorer | None) -> Any:
    """Convert a pattern, selector, hybrid or scorer to data. None means dense.

    Raises:
        ValueError: a policy file cannot express the object.
    """
    if rule is None:
        return DenseSpec()
    if isinstance(rule, p.Union):
        return AnyOfSpec(parts=tuple(to_spec(part) for part in rule.parts))
    if isinstance(rule, p.Intersection):
        return AllOfSpec(parts=tuple(to_spec(part) for part in rule.parts))
    if isinstance(rule, s.Hybrid):
        return HybridSpec(pattern=to_spec(rule.pattern), selector=to_spec(rule.selector))
    if type(rule) is s.TopK:
        return _top_k_spec(rule)
    if type(rule) is s.TopP:
        return TopPSpec(mass=rule.mass, scorer=to_spec(rule.scorer), per=rule.per)
    if type(rule) is s.Threshold:
        return ThresholdSpec(share=rule.share, of=rule.of, scorer=to_spec(rule.scorer), per=rule.per)
    if type(rule) is s.TwoStage:
        name = "blocks" if isinstance(rule.keep, int) else "share"
        return TwoStageSpec(**{name: rule.keep}, fine=to_spec(rule.fine), panel=rule.panel)  # type: ignore[arg-type]
    leaf = _SPEC_OF.get(type(rule))
    if leaf is None:
        raise ValueError(f"a policy cannot express {rule!r}; use a pattern, selector or hybrid of dynaxx")
    own = {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]
    return leaf(**{name: own[name] for name in leaf.model_fields if name != "kind"})


def _top_k_spec(rule: s.TopK) -> TopKSpec:
    values = rule.budget if isinstance(rule.budget, tuple) else (rule.budget,)
    if len({type(value) for value in values}) > 1:
        raise ValueError(f"`budget` must be shares or block counts, not both, got {rule.budget}; use one rule for each")
    name = "blocks" if isinstance(values[0], int) else "share"
    return TopKSpec(**{name: rule.budget}, scorer=to_spec(rule.scorer), floor=rule.floor, per=rule.per)  # type: ignore[arg-type]


def _floats(value: Any) -> Any:
    return tuple(float(each) for each in value) if isinstance(value, tuple) else float(value or 0.0)
