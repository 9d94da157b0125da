# SPDX-License-Identifier: Apache-2.0
"""Decoding steps over an engine's pages: persistent page summaries, and attention over chosen pages.

A step that a CUDA graph captured replays the same kernels for every later step of its batch size, so it must not depend
on lengths that only the host knows. The device therefore decides whether a sequence decodes sparse. A layer has two
limits, and a sequence reads chosen pages if its length lies between them. All other sequences read all of their pages.
The kill switch, a reloaded policy and a resting layer change the limits, and the next replay uses them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynaxx.integrations.runtime.paged import Pages, SequenceRow, Sequences, Softmax
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.policy import Policy
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
        place = pages.memory.data_ptr(), len(pages.memory)
        if known is None or known.bound != bound or (self._memory, len(known.low)) != place:
            return None
        return known

    def _made(self, pages: Pages, bound: float) -> PageSummaries:
        known = summarize_pages(every_page(pages), bound=bound).summaries
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
        pages: the cache, including the keys of this step, in pages of the plan's size.
        sequences: the sequences of the step over such pages.
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


def every_page(pages: Pages) -> PagedCache:
    """Return the whole memory as one long sequence."""
    whole = pages if pages.whole is None else pages._replace(memory=pages.whole)
    count, device = len(whole.memory), whole.memory.device
    used = torch.tensor([count * whole.page_size], dtype=torch.int32, device=device)
    table = torch.arange(count, dtype=torch.int32, device=device)[None]
    return whole.cache(used, table).with_page_size(pages.page_size)


NEVER = 2**31 - 1  # more keys than any sequence has
ALIGNED = 4  # int32 in 16 bytes
Limits = tuple[int, int]  # a sequence of `first` <= keys < `second` decodes sparse


def decode_limits(policy: Policy, blocked: DenseReason | None) -> Limits:
    """Return the limits between which sequences of a layer decode sparse; an empty range if the layer is `blocked`."""
    if blocked is not None:
        return NEVER, NEVER
    below, start = policy.decode_borders
    rollout = policy.rollout
    most = NEVER if rollout.max_tokens is None else rollout.max_tokens + 1
    return max(below if start is None else start, rollout.min_tokens), most


class LayerLimits:
    """The limits of some layers on the device, in memory that captured graphs read.

    Args:
        layers: indices of the layers with a decode rule, in the order in which a pass runs them.
        device: the device of the cache.
    """

    def __init__(self, layers: Sequence[int], device: torch.device | str) -> None:
        self.rows = {layer: row for row, layer in enumerate(layers)}
        self.memory = torch.full((2, len(layers), 1), NEVER, dtype=torch.int32, device=device)
        self._written: tuple[Limits, ...] = ()

    def write(self, limits: Sequence[Limits]) -> None:
        """Set the limits of all layers, in order. Copies to the device only if they changed."""
        values = tuple(limits)
        if values != self._written:
            self.memory.copy_(torch.tensor(values, dtype=torch.int32, device="cpu").T[..., None])
            self._written = values


class StepLengths:
    """The lengths of one decoding step with one query per sequence, split for each layer.

    Args:
        limits: the limits of the layers that share the page table.
        seqused_k: (batch,) int32 number of keys of each sequence, 0 for padding, in memory that later steps reuse.
    """

    def __init__(self, limits: LayerLimits, seqused_k: Tensor) -> None:
        self.limits = limits
        self.seqused_k = seqused_k
        self._lengths: tuple[Tensor, Tensor] | None = None

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the lengths of the sequences that read chosen pages, and of the others, each (batch,) int32.

        Each sequence has length 0 in one of the two tensors. The first layer of a pass computes them for all layers, so
        that a graph that captures the pass also captures this computation.
        """
        row = self.limits.rows[layer]
        if row == 0 or self._lengths is None:
            used, (least, most) = self.seqused_k[None], self.limits.memory
            batch = used.shape[1]
            wide = -(-batch // ALIGNED) * ALIGNED  # Triton specializes kernels on the alignment of pointers
            sparse, dense = used.new_empty(2, len(self.limits.rows), wide)[..., :batch]
            torch.mul(used, (used >= least) & (used < most), out=sparse)
            torch.sub(used, sparse, out=dense)
            self._lengths = sparse, dense
        sparse, dense = self._lengths
        return sparse[row], dense[row]


def one_query_each(sequences: Sequences) -> bool:
    """Return whether the step has one query per sequence, in the order of the page table, with padding at the end."""
    rows = sequences.rows
    return bool(rows) and all(row.index == row.start == at and row.seqlen_q == 1 for at, row in enumerate(rows))


def decode_step(
    q: Tensor,
    pages: Pages,
    sequences: Sequences,
    divided: tuple[Pages, Sequences],
    lengths: tuple[Tensor, Tensor],
    plan: DecodePlan,
    summaries: PageSummaries | None,
    softmax: Softmax,
    out: Tensor,
) -> None:
    """Attend from one query of each sequence to chosen pages or to all pages.

    Args:
        q: (tokens, q_heads, head_dim); the first tokens are the sequences' queries, the rest is padding.
        pages: the cache, including the keys of this step.
        sequences: the sequences of the step.
        divided: both in pages of the plan's size.
        lengths: the result of `StepLengths.of_layer`.
        plan: the layer's decode rule.
        summaries: current summaries; None if the plan reads every page.
        softmax: the softmax of the layer.
        out: output of the shape of q; one token is written per row of the page table, 0 for rows without a sequence.
    """
    batch = min(len(sequences.seqused_k), len(q))
    queries, found, table = q[:batch, None], out[:batch, None], sequences.page_table[:batch]
    if plan.budget.reads_everything:
        found.copy_(sparse_decode(queries, pages.cache(sequences.seqused_k[:batch], table), **softmax.arguments))
        return
    sparse, dense = (each[:batch] for each in lengths)
    smaller, places = divided[0], divided[1].page_table[:batch]
    chosen = sparse_decode(queries, smaller.cache(sparse, places, summaries), plan.budget, **softmax.arguments)
    every = sparse_decode(queries, pages.cache(dense, table), **softmax.arguments)
    torch.add(chosen, every, out=found)  # a sequence without keys contributes 0
