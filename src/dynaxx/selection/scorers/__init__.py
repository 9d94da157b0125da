# SPDX-License-Identifier: Apache-2.0
"""Scorers: cheap estimates of the attention that each q block pays to each kv block.

Shapes: B batch, Hq / Hk q and kv heads, R rows of q blocks, C kv blocks, D head_dim.
"""

from dynaxx.selection.scorers.base import MEMORY_BUDGET, Scorer, ScoreRows
from dynaxx.selection.scorers.pooling import AntiDiagonal, MeanPool, MinMax
from dynaxx.selection.scorers.query import MeanQuery, TileQueries
from dynaxx.settings import import_folder

__all__ = [
    "MEMORY_BUDGET",
    "AntiDiagonal",
    "MeanPool",
    "MeanQuery",
    "MinMax",
    "ScoreRows",
    "Scorer",
    "TileQueries",
]

vars().update(import_folder(__name__, Scorer))
