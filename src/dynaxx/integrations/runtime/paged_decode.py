# SPDX-License-Identifier: Apache-2.0
"""Decoding steps over an engine's pages: persistent page summaries, and attention over chosen pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynaxx.integrations.runtime.paged import Pages, SequenceRow, Sequences, Softmax
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.policy.resolve import DecodePlan


class LivingSummaries:
    """Summaries of one layer's pages by physical page, so that a shared prefix is summarized once."""

    def __init__(self) -> None:
        self._summaries: PageSummaries | None = None
        self._memory = 0  # address of the summarized pages

    def update(self, pages: Pages, sequences: Sequences, bound: float) -> PageSummaries:
        """Update the summaries with the keys of a step, which are in the cache. New summaries cover all pages."""
        known = self._known(pages, bound)
        if known is None:
            return self._made(pages, bound)
        for part, new_tokens in sequences.with_new_keys:
            summarize_pages(part.cache(pages, known), new_tokens=new_tokens)
        return known

    def update_later(self, pages: Pages, bound: float) -> PageSummaries | None:
        """Return the summaries, to which the caller adds the keys of a step later; None for new, complete ones."""
        known = self._known(pages, bound)
        if known is None:
            self._made(pages, bound)
        return known

    def forget(self) -> None:
        """Drop the summaries, because a step will add no keys to them."""
        self._summaries = None

    def update_last(self, pages: Pages, sequences: Sequences, bound: float) -> PageSummaries:
        """Update the summaries for a step with one new key per sequence, without the host. A CUDA graph may capture it.

        Raises:
            RuntimeError: the summaries do not exist yet, and a graph is being captured. Run a step before the capture.
        """
        known = self._known(pages, bound)
        if known is None:
            if pages.memory.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("page summaries must exist before a CUDA graph is captured; run one step first")
            return self._made(pages, bound)
        summarize_pages(pages.cache(sequences.seqused_k, sequences.page_table, known), new_tokens=1)
        return known

    def _known(self, pages: Pages, bound: float) -> PageSummaries | None:
        known = self._summaries
        if known is None or known.bound != bound or (self._memory, len(known.low)) != _place(pages):
            return None
        return known

    def _made(self, pages: Pages, bound: float) -> PageSummaries:
        known = summarize_pages(_every_page(pages), bound=bound).summaries
        assert known is not None, "just made"
        self._summaries, self._memory = known, pages.memory.data_ptr()
        return known


def decode(
    q: Tensor,
    pages: Pages,
    sequences: Sequences,
    rows: Sequence[SequenceRow],
    plan: DecodePlan,
    summaries: PageSummaries | None,
    softmax: Softmax,
    out: Tensor,
) -> None:
    """Attend from a few queries per sequence to the pages that the plan chooses.

    Sequences with equal numbers of queries run in one call.

    Args:
        q: (tokens, q_heads, head_dim), all tokens of the step.
        pages: the cache, including the keys of this step.
        sequences: the sequences of the step.
        rows: the sequences to compute.
        plan: the layer's decode rule.
        summaries: current summaries; None if the plan reads every page.
        softmax: the softmax of the layer.
        out: output of the shape of q; the tokens of `rows` are written.
    """
    for seqlen_q in sorted({row.seqlen_q for row in rows}):
        some = [row for row in rows if row.seqlen_q == seqlen_q]
        part = sequences.part(some, 1 << (len(some) - 1).bit_length())  # few batch sizes need few kernels
        found = sparse_decode(q[part.places], part.cache(pages, summaries), plan.budget, **softmax.arguments)
        out[part.places[: len(some)]] = found[: len(some)]


def _every_page(pages: Pages) -> PagedCache:
    """Return the whole memory as one long sequence."""
    count, device = len(pages.memory), pages.memory.device
    used = torch.tensor([count * pages.page_size], dtype=torch.int32, device=device)
    return pages.cache(used, torch.arange(count, dtype=torch.int32, device=device)[None])


def _place(pages: Pages) -> tuple[int, int]:
    """Return the address of the memory and its number of pages."""
    return pages.memory.data_ptr(), len(pages.memory)
