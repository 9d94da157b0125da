# SPDX-License-Identifier: Apache-2.0
"""`PageBudget`: the rule that chooses which pages of a kv cache a decoding step reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.layout.paging import PagedCache
from dynaxx.lazy import lazy
from dynaxx.patterns import Causal, Full, GlobalTokens, Pattern, Sink, SlidingWindow, Union
from dynaxx.selection.base import Hybrid, Selector
from dynaxx.selection.budgets import TopK
from dynaxx.selection.scorers import MeanPool, MeanQuery, MinMax
from dynaxx.settings import Count, Positive, Share, check_settings

MAX_PAGES = 2**31 - 1  # more than a cache can have


@typed
@dataclass(frozen=True)
class PageBudget:
    """Read the pages of the first `sinks` tokens, the pages of the last `window` tokens, and the best-scored others.

    Pages are read whole. One choice serves all query tokens of a step and all q heads of a kv head.

    Args:
        budget: an int is a number of pages, a float a share of the sequence's pages (rounded up). The pages of the
            sinks and of the window do not count. A tuple has one value per kv head. 1.0 is dense attention.
        sinks: number of first tokens whose pages are always read.
        window: number of last tokens whose pages are always read, at least 1. It includes the query's own token; for
            several query tokens it counts back from the first of them.
        bound: how summaries score a page: 1.0 uses the largest score that a key may have, 0.0 the score of the mean
            key.
    """

    budget: Count | Share | tuple[Count | Share, ...]
    sinks: Count = 0
    window: Positive = 1
    bound: Share = 1.0

    def __post_init__(self) -> None:
        """Check the fields; see `check_settings`."""
        check_settings(self, PageBudget)

    @classmethod
    @typed
    def of(cls, rule: Pattern | Selector | Hybrid) -> PageBudget:
        """Return the decoding rule with the sinks and window of a pattern and the budget and scorer of a selector.

        A page has one summary, even if the scorer looks at parts of a block. `MeanQuery` becomes a bound of 0.75.

        Raises:
            ValueError: decoding has no equivalent of the rule; the message lists the supported rules.
        """
        pattern, selector = (rule.pattern, rule.selector) if isinstance(rule, Hybrid) else (None, None)
        if isinstance(rule, Pattern):
            pattern = rule
        elif isinstance(rule, Selector):
            selector = rule
        if isinstance(pattern, Causal | Full):
            return cls(1.0)
        budget: int | float | tuple[int | float, ...] = 0
        bound = 1.0
        if isinstance(selector, TopK) and isinstance(selector.scorer, MeanQuery | MinMax | MeanPool):
            budget = selector.budget
            bound = _bound_of(selector.scorer)
        elif selector is not None:
            raise _unequal(rule)
        sinks, window = 0, 1
        for part in pattern.parts if isinstance(pattern, Union) else () if pattern is None else (pattern,):
            if isinstance(part, Sink | GlobalTokens) and isinstance(part.tokens, int):
                sinks = max(sinks, part.tokens)
            elif isinstance(part, SlidingWindow) and isinstance(part.window, int):
                window = max(window, part.window)
            else:
                raise _unequal(rule)
        return cls(budget, sinks, window, bound)

    @lazy
    def budgets(self) -> tuple[int | float, ...]:
        """Return the budget as a tuple of one value, or of one per kv head."""
        return self.budget if isinstance(self.budget, tuple) else (self.budget,)

    @lazy
    def reads_everything(self) -> bool:
        """Return whether the rule is dense attention at every length."""
        return all(isinstance(budget, float) and budget == 1 for budget in self.budgets)

    def slots(self, cache: PagedCache, seqlen_q: int) -> int:
        """Return the largest number of pages that a step may choose at any length, which is what is allocated."""
        most = max(budget if isinstance(budget, int) else share_of(budget, cache.max_pages) for budget in self.budgets)
        forced = pages_touched(self.sinks, cache.page_size) + pages_touched(self.window + seqlen_q - 1, cache.page_size)
        return min(cache.max_pages, most + forced)

    def wanted(self, kv_heads: int, device: torch.device) -> Tensor:
        """Return (2, kv_heads) fp32; a head reads row 0 + ceil(row 1 * the sequence's pages) pages."""
        if len(self.budgets) not in (1, kv_heads):
            raise ValueError(f"`budget` must be one value or one per kv head ({kv_heads}), got {len(self.budgets)}")
        return _wanted(*self._counts_and_shares, kv_heads, device)

    @lazy
    def _counts_and_shares(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        counts = tuple(float(min(budget, MAX_PAGES)) if isinstance(budget, int) else 0.0 for budget in self.budgets)
        return counts, tuple(budget if isinstance(budget, float) else 0.0 for budget in self.budgets)


@lru_cache(maxsize=4096)
@on_host
def share_of(share: float, pages: int) -> int:
    """Return ceil(share * pages), computed in fp32 as in every backend."""
    return math.ceil(float(torch.tensor(share, dtype=torch.float32) * pages))


def pages_touched(tokens: int, page_size: int) -> int:
    """Return the largest number of pages that `tokens` consecutive tokens can touch."""
    return (tokens + page_size - 2) // page_size + 1 if tokens else 0


def _bound_of(scorer: MeanQuery | MeanPool | MinMax) -> float:
    if isinstance(scorer, MinMax):
        return scorer.bound
    return 0.75 if isinstance(scorer, MeanQuery) else 0.0


@LayoutCache
def _wanted(counts: tuple[float, ...], shares: tuple[float, ...], kv_heads: int, device: torch.device) -> Tensor:
    table = torch.tensor([counts, shares], dtype=torch.float32, device="cpu")
    return table.expand(2, kv_heads).contiguous().to(device)


def _unequal(rule: object) -> ValueError:
    return ValueError(
        "decoding supports unions of Sink, GlobalTokens(count) and SlidingWindow(count), TopK with MeanQuery, MeanPool "
        f"or MinMax, and hybrids of both, got {rule!r}"
    )
