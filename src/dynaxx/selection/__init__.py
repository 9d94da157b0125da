# SPDX-License-Identifier: Apache-2.0
"""Choose blocks from the data: score each block cheaply, then apply a budget. `pattern | selector` combines both.

The files:

    base, choice               selectors, hybrids, and heads that choose together
    budgets                    what a selector keeps
    scorers/                   estimates of attention, one method per file
    in_torch, in_core, device  the same choice in torch, in the C++ core and on a GPU
    static                     the blocks that a hybrid's pattern always shows
    pages                      which pages of a cache a decoding step reads
    packed, recall             packed batches, and how much attention a choice keeps
"""

from dynaxx.selection.base import Hybrid, Selector, select_blocks
from dynaxx.selection.budgets import Threshold, TopK, TopP
from dynaxx.selection.recall import Recall, recall
from dynaxx.selection.scorers import (
    AntiDiagonal,
    MeanPool,
    MeanQuery,
    MinMax,
    Scorer,
    TileQueries,
)
from dynaxx.settings import import_folder

__all__ = [
    "AntiDiagonal",
    "Hybrid",
    "MeanPool",
    "MeanQuery",
    "MinMax",
    "Recall",
    "Scorer",
    "Selector",
    "Threshold",
    "TileQueries",
    "TopK",
    "TopP",
    "recall",
    "select_blocks",
]

vars().update(import_folder(__name__, Scorer, Selector))
