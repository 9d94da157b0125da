# SPDX-License-Identifier: Apache-2.0
"""Choose blocks from the data: score each block cheaply, then apply a budget. `pattern | selector` combines both."""

from dynaxx.selection.base import Hybrid, Selector, select_blocks
from dynaxx.selection.budgets import Threshold, TopK, TopP
from dynaxx.selection.globals import ClusterGlobals
from dynaxx.selection.recall import Recall, recall
from dynaxx.selection.scorers import (
    AntiDiagonal,
    KeyClusters,
    LastQueryProbe,
    MeanPool,
    MeanQuery,
    MinMax,
    Scorer,
    SimHash,
    TileQueries,
    TwoStage,
)

__all__ = [
    "AntiDiagonal",
    "ClusterGlobals",
    "Hybrid",
    "KeyClusters",
    "LastQueryProbe",
    "MeanPool",
    "MeanQuery",
    "MinMax",
    "Recall",
    "Scorer",
    "Selector",
    "SimHash",
    "Threshold",
    "TileQueries",
    "TopK",
    "TopP",
    "TwoStage",
    "recall",
    "select_blocks",
]
