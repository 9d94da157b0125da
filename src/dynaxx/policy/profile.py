# SPDX-License-Identifier: Apache-2.0
"""A profile of attention: histograms of statistics over calls, per layer and head.

A policy contains a profile as its reference, and a running process records one to compare with it.

One value of a histogram is the mean of a statistic over the sampled query rows of one call, because the rows of a call
depend on one another and the calls of different requests hardly do. Statistics are shares from 0 to 1. Bins have edges
at sin^2, so they are finer towards both ends, where shares vary less.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dynaxx.policy.document import MAX_LISTED, Count, Document, NotNegative, Positive, Total

FORMAT: Literal["dynaxx.profile"] = "dynaxx.profile"
STATISTICS = ("recall", "entropy", "local")
BINS = 24
EDGES = torch.tensor(
    [math.sin(math.pi / 2 * i / BINS) ** 2 for i in range(1, BINS)], device="cpu", dtype=torch.float32
)  # between the bins
LADDER = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)  # factors on budgets whose recall is recorded for retuning

Histogram = Annotated[tuple[Total, ...], Field(max_length=BINS)]
Histograms = Annotated[tuple[Histogram, ...], Field(max_length=MAX_LISTED)]


class LayerProfile(Document):
    """The histograms of one layer."""

    layer: Count
    calls: Total  # number of calls in each histogram
    recall: Histograms  # per q head: share of dense attention mass in the visited blocks
    entropy: Histograms  # entropy of dense attention relative to a uniform distribution
    local: Histograms  # share of dense attention mass on the nearest keys
    ladder_calls: Total = 0
    ladder: tuple[tuple[NotNegative, ...], ...] = ()  # per q head: mean recall with budgets times each of `LADDER`

    @model_validator(mode="after")
    def _shapes(self) -> LayerProfile:
        heads = len(self.recall)
        for name in STATISTICS:
            found = getattr(self, name)
            if len(found) != heads or any(len(each) != BINS for each in found):
                raise ValueError(f"`{name}` must be {heads} histograms of {BINS} bins")
            if any(sum(each) != self.calls for each in found):
                raise ValueError(f"the counts of each histogram of `{name}` must add up to `calls` = {self.calls}")
        if self.ladder and (len(self.ladder) != heads or any(len(each) != len(LADDER) for each in self.ladder)):
            raise ValueError(f"`ladder` must be {heads} rows of {len(LADDER)}")
        return self

    def counts(self) -> Tensor:
        """Return the counts, (statistics, heads, bins) int64."""
        return torch.tensor([getattr(self, name) for name in STATISTICS], dtype=torch.float32, device="cpu")


class Profile(Document):
    """The attention of one model under one policy on some traffic. Read with `load_profile`."""

    format: Literal["dynaxx.profile"] = FORMAT
    version: Literal[1] = 1
    policy: str = ""  # digest of the rules in force while it was recorded, see `rules_digest`
    command: str = ""  # the command that recorded it
    requests: Total = 0
    rows: Positive = 16  # query rows per call
    layers: Annotated[tuple[LayerProfile, ...], Field(min_length=1, max_length=MAX_LISTED)]

    @model_validator(mode="after")
    def _each_layer_once(self) -> Profile:
        layers = [each.layer for each in self.layers]
        if len(set(layers)) != len(layers):
            raise ValueError("`layers` must name each layer once")
        return self

    def of_layer(self, layer: int) -> LayerProfile | None:
        """Return the profile of one layer, or None."""
        return next((each for each in self.layers if each.layer == layer), None)


class LayerRecord:
    """Collect the profile of one layer."""

    def __init__(self, heads: int) -> None:
        self.calls = 0
        self.counts = torch.zeros(len(STATISTICS), heads, BINS, dtype=torch.int64, device="cpu")
        self.ladder_calls = 0
        self.ladder = torch.zeros(heads, len(LADDER), dtype=torch.float64, device="cpu")

    def add(self, values: Tensor) -> None:
        """Add the (statistics, heads) shares of one call."""
        place = torch.bucketize(values.float().contiguous().clamp(0, 1), EDGES)
        self.counts.scatter_add_(2, place[..., None], torch.ones_like(place)[..., None])
        self.calls += 1

    def add_ladder(self, recalls: Tensor) -> None:
        """Add the (heads, len(LADDER)) recall of one call, with budgets times each factor."""
        self.ladder += recalls.double()
        self.ladder_calls += 1

    def clear(self) -> None:
        """Drop everything recorded so far."""
        self.__init__(self.counts.shape[1])  # type: ignore[misc]

    def to_profile(self, layer: int) -> LayerProfile:
        """Return the profile as a document."""
        named = {name: tuple(map(tuple, rows)) for name, rows in zip(STATISTICS, self.counts.tolist(), strict=True)}
        mean = (self.ladder / max(1, self.ladder_calls)).clamp(max=1).tolist()
        ladder = tuple(tuple(round(value, 4) for value in row) for row in mean) if self.ladder_calls else ()
        return LayerProfile(layer=layer, calls=self.calls, ladder_calls=self.ladder_calls, ladder=ladder, **named)


def midpoints() -> Tensor:
    """Return the middle of each bin, (bins,) shares."""
    edges = torch.cat(
        [torch.zeros(1, dtype=torch.float32, device="cpu"), EDGES, torch.ones(1, dtype=torch.float32, device="cpu")]
    )
    return (edges[1:] + edges[:-1]) / 2
