# SPDX-License-Identifier: Apache-2.0
"""Global columns from the data: blocks that represent the clusters of keys and that every query sees."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.selection.base import Selector
from dynaxx.selection.scorers import KeyClusters, Scorer
from dynaxx.selection.scorers.clusters import ClusterRanks, Clusters, Iterations
from dynaxx.settings import Count, Seed


@dataclass(frozen=True)
class ClusterGlobals(Selector, kind="cluster_globals"):
    """The same blocks for every query: for each cluster of keys, the blocks that hold most of its keys.

    The keys of each kv head are clustered as in `KeyClusters` (the inverted-file index of nearest-neighbour search).
    Every query then sees at least one block of each cluster. These blocks act as the global tokens of Longformer and
    BigBird, at positions that the prompt's keys determine. The choice does not depend on the queries, so it serves
    every q head of a group and all later queries. Combine it with `LocalBlocks` or `SlidingWindow`.

    Args:
        per_cluster: number of blocks that each cluster keeps. A cluster whose keys lie in fewer blocks keeps fewer, and
            one block may represent several clusters. A tuple has one number per q head. `math.inf` keeps every block.
        clusters: number of clusters, as in `KeyClusters`.
        iterations: steps of k-means, as in `KeyClusters`.
        seed: seed of the starting keys, as in `KeyClusters`.
    """

    per_cluster: Count | tuple[Count, ...] = 1
    clusters: Clusters = 32
    iterations: Iterations = 4
    seed: Seed = 0
    scorer: Scorer = field(init=False, repr=False, compare=False)
    budget_field: ClassVar[str] = "per_cluster"
    nothing: ClassVar[int] = 0
    everything: ClassVar[int] = 2**31 - 1  # more blocks than a row has

    def __post_init__(self) -> None:
        """Check the settings, and make the scorer. `math.inf` keeps every block, and whole floats are integers."""
        given = self.per_cluster
        counts = tuple(map(self._whole, given)) if isinstance(given, tuple | list) else self._whole(given)
        object.__setattr__(self, "per_cluster", counts)
        super().__post_init__()
        index = KeyClusters(self.clusters, iterations=self.iterations, seed=self.seed)
        ranked = max((blocks for blocks in self._counts() if blocks < self.everything), default=0)
        object.__setattr__(self, "scorer", ClusterRanks(index, ranked))

    @classmethod
    def _whole(cls, number: Any) -> Any:
        if isinstance(number, float) and number == math.inf:
            return cls.everything
        return int(number) if isinstance(number, float) and number.is_integer() else number

    @override
    def choose(self, scores: Tensor, optional: Tensor, visible: Tensor) -> Tensor:
        counts = self._counts()
        if len(counts) not in (1, scores.shape[1]):
            raise ValueError(
                f"`per_cluster` must be one value or one per q head ({scores.shape[1]}), got {len(counts)}"
            )
        count = torch.tensor(counts, dtype=torch.float32, device=scores.device)[:, None, None]
        return ((scores > -count) | (count >= scores.shape[-1])) & optional

    def _counts(self) -> tuple[int, ...]:
        return self.per_cluster if isinstance(self.per_cluster, tuple) else (self.per_cluster,)
