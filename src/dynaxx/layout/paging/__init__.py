# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values in pages: the cache, its pages, their summaries, exact tokens, compressed tokens."""

from dynaxx.layout.paging.paged_cache import CACHE_DTYPES, PagedCache
from dynaxx.layout.paging.pages import PageStrides, quantize_pages
from dynaxx.layout.paging.summaries import PageSummaries

__all__ = ["CACHE_DTYPES", "PageStrides", "PageSummaries", "PagedCache", "quantize_pages"]
