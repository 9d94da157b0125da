"""Data-dependent choice of blocks: a cheap score per block, then a budget. `pattern | selector` combines both kinds."""

from dynaxx.selection.base import Hybrid, Selector, select_blocks
from dynaxx.selection.budgets import TopK, TopP
from dynaxx.selection.scorers import LastQueryProbe, MeanPool, MinMax, Scorer

__all__ = ["Hybrid", "LastQueryProbe", "MeanPool", "MinMax", "Scorer", "Selector", "TopK", "TopP", "select_blocks"]
