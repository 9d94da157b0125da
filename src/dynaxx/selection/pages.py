# SPDX-License-Identifier: Apache-2.0
"""`PageBudget`: the rule that chooses which pages of a kv cache a decoding step reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, typed
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.layout.paging import PagedCache
from dynaxx.layout.paging.pages import PAGE_SIZES
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
        if self.budget == ():
            raise ValueError("`budget` must be one value or one per kv head, got ()")

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


LARGEST_BLOCK = 128  # largest block size of a layout
TOKEN_PAGE_SIZES = tuple(size for size in PAGE_SIZES if size >= 16)  # smaller ones hold compressed tokens


@dataclass(frozen=True)
class PagePlan:
    """The pages to read at every step up to a largest length. Each step looks its pages up on the device.

    Use it for rules over positions that `PageBudget` cannot express; it needs no summaries. A page is read whole if
    the rule shows any of its keys to any query in the page of the last token, or to one of the `seqlen_q - 1` tokens
    before it.
    """

    table: Tensor  # (pages, slots) int32: row p holds the pages for a last token in page p, ascending, then -1
    page_size: int

    @classmethod
    @typed
    @on_host
    def of(
        cls,
        rule: Pattern,
        max_seqlen: int,
        *,
        page_size: int = 64,
        seqlen_q: int = 1,
        device: torch.device | str = "cpu",
    ) -> PagePlan:
        """Compute a plan from the layout of a rule, in O(visited blocks) on the host.

        Args:
            rule: a pattern.
            max_seqlen: number of keys of the longest sequence.
            page_size: page size of the cache, 16, 32, 64, 128 or 256.
            seqlen_q: largest number of query tokens in a step.
            device: the device of the plan's table.

        Raises:
            TypeError: `rule` is not a pattern, or a size is not an integer.
            ValueError: a size is out of range, or the rule needs the tokens of a request.
        """
        max_seqlen, seqlen_q = as_integer("max_seqlen", max_seqlen), as_integer("seqlen_q", seqlen_q)
        if max_seqlen < 1 or seqlen_q < 1:
            raise ValueError(f"`max_seqlen` and `seqlen_q` must be at least 1, got {max_seqlen} and {seqlen_q}")
        if not seqlen_q <= max_seqlen < 2**31:
            raise ValueError(f"`seqlen_q` must be up to `max_seqlen` < 2^31, got {seqlen_q} and {max_seqlen}")
        if as_integer("page_size", page_size) not in TOKEN_PAGE_SIZES:
            raise ValueError(f"`page_size` must be one of {TOKEN_PAGE_SIZES}, got {page_size}")
        block = min(page_size, LARGEST_BLOCK)
        layout = rule.layout(max_seqlen, block_size=block)
        rows = torch.arange(layout.q_blocks).repeat_interleave(layout.kv_num_blocks.flatten())
        rows, pages = (x * block // page_size for x in (rows, layout.kv_indices[: len(rows)].long()))
        count = -(-max_seqlen // page_size)
        pairs = [rows + back for back in range((seqlen_q + page_size - 2) // page_size + 1)]
        pairs = torch.cat([row * count + pages for row in pairs]).unique()  # ascending
        rows, pages = pairs // count, pairs % count
        own, kept = torch.bincount(rows, minlength=count), rows < count
        table = torch.full((count, int(own[:count].max())), -1, dtype=torch.int32)
        place = torch.arange(len(rows)) - (own.cumsum(0) - own)[rows]
        table[rows[kept], place[kept]] = pages[kept].int()
        return cls(table.to(device), page_size)

    @typed
    def pages(self, seqused_k: Tensor, kv_heads: int) -> Tensor:
        """Return the step's `block_indices` for `sparse_decode`, (batch, kv_heads, slots) int32, without synchronizing.

        Args:
            seqused_k: (batch,) int32 lengths of the cache, on the plan's device. A length beyond the plan raises on a
                CPU; a GPU uses the plan's last row.
            kv_heads: number of kv heads.

        Raises:
            TypeError: `seqused_k` is not a tensor, or `kv_heads` is not an integer.
            ValueError: `seqused_k` has another shape, dtype or device, is too long, or `kv_heads` is below 1.
        """
        if seqused_k.ndim != 1 or seqused_k.dtype != torch.int32 or seqused_k.device != self.table.device:
            raise ValueError(
                f"`seqused_k` must be (batch,) int32 on {self.table.device}, got {seqused_k.dtype} "
                f"{tuple(seqused_k.shape)} on {seqused_k.device}"
            )
        if as_integer("kv_heads", kv_heads) < 1:
            raise ValueError(f"`kv_heads` must be at least 1, got {kv_heads}")
        most = len(self.table) * self.page_size
        if seqused_k.device.type == "cpu" and seqused_k.numel() and int(seqused_k.max()) > most:
            raise ValueError(f"`seqused_k` must be at most the {most} keys of the plan, got {int(seqused_k.max())}")
        last = ((seqused_k.long() - 1) // self.page_size).clamp(0, len(self.table) - 1)
        return self.table[last][:, None].expand(-1, kv_heads, -1).contiguous()
