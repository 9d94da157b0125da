# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values in pages, and sequences that kernels read where the pages are."""

from dynaxx.layout.paging.exact_tokens import ExactTokens
from dynaxx.layout.paging.in_place import SequenceKeys, divided_pages, divided_table, places_of, rows_of
from dynaxx.layout.paging.paged_cache import CACHE_DTYPES, PagedCache
from dynaxx.layout.paging.pages import PageStrides, quantize_pages
from dynaxx.layout.paging.summaries import PageSummaries

__all__ = [
    "CACHE_DTYPES",
    "ExactTokens",
    "PageStrides",
    "PageSummaries",
    "PagedCache",
    "SequenceKeys",
    "divided_pages",
    "divided_table",
    "places_of",
    "quantize_pages",
    "rows_of",
]
