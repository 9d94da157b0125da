# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache whose pages are split over ranks.

Every rank's cache has the logical pages of the whole sequence. Its page table is -1 for pages that other ranks hold,
and `seqused_k` counts all keys. All ranks have the same queries. Each rank attends to its own pages, and the results
are merged by their log-sum-exp.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.distributed.group import Mesh, group_of, peer_errors
from dynaxx.kernels.decode.reference import page_range, page_scores
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.attention import SparseAttentionOutput, merge_states
from dynaxx.ops.decode import sparse_decode as decode_on_one_device
from dynaxx.selection.pages import PageBudget


@typed
@torch.no_grad()
def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    pages: PageBudget | None,
    mesh: Mesh,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend from the last tokens of each sequence to pages on all ranks. All ranks of the mesh must call it.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), equal on all ranks.
        cache: this rank's pages. Its page table is -1 for pages of other ranks, and each page is on exactly one rank.
        pages: a budget over all ranks together, which selects the same pages as on one device; None: all pages.
        mesh: a one-dimensional DeviceMesh or a process group.
        scale: softmax scale, default head_dim ** -0.5.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: as for `dynaxx.sparse_decode`.

    Returns:
        The result of `dynaxx.sparse_decode`, equal on all ranks.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `dynaxx.sparse_decode`; ValueError also if the cache has no
            page table.
        PeerError: another rank failed.
    """
    group = group_of(mesh)
    if cache.page_table is None:
        raise ValueError("`cache` must have a page table that says which pages this rank holds")
    listed = None
    if pages is not None and not pages.reads_everything:
        chosen = select_split_pages(q, cache, pages, mesh, scale=scale)
        held = cache.page_table.gather(1, chosen.clamp(min=0).flatten(1).long()).view(chosen.shape) >= 0
        listed = torch.where(held, chosen, -1)
    out, lse = decode_on_one_device(q, cache, listed, scale=scale, return_lse=True, backend=backend)
    with peer_errors("merging the results of a decode step", group):
        outs, lses = (_of_all_ranks(x, group) for x in (out, lse))
    merged = merge_states(list(zip(outs, lses, strict=True)))
    return merged if return_lse else merged.out


@typed
@torch.no_grad()
def select_split_pages(
    q: Tensor, cache: PagedCache, budget: PageBudget, mesh: Mesh, *, scale: float | None = None
) -> Tensor:
    """Select the pages that a decode step reads, among those of all ranks.

    Each rank scores its own pages; the ranks then compare scores, so all of them select the same pages.

    Args:
        q: queries, as for `sparse_decode`.
        cache: this rank's pages, with summaries whose bound equals the budget's.
        budget: how many pages to select over all ranks.
        mesh: a one-dimensional DeviceMesh or a process group.
        scale: softmax scale, default head_dim ** -0.5.

    Returns:
        (batch, kv_heads, slots) int32: logical pages in ascending order, padded with -1; equal on all ranks, and equal
        to what `dynaxx.select_pages` selects on one device.

    Raises:
        ValueError: the cache has no page table, or no summaries with this bound.
        PeerError: another rank failed.
    """
    if cache.page_table is None or cache.summaries is None or cache.summaries.bound != budget.bound:
        raise ValueError(
            f"`cache` must have a page table and summaries of bound {budget.bound}; use "
            "summarize_pages(cache, bound=budget.bound)"
        )
    group = group_of(mesh)
    first, stop = page_range(cache)
    numbers = torch.arange(cache.max_pages, device=q.device)
    in_use = (numbers >= first[:, None]) & (numbers < stop[:, None])
    scores = page_scores(q, cache, softmax_scale(scale, q.shape[-1]))
    scores = scores.masked_fill(~(in_use & (cache.page_table >= 0))[:, None], -torch.inf)
    with peer_errors("comparing scores of pages", group):
        dist.all_reduce(scores, dist.ReduceOp.MAX, group=group)
    exists = (scores > -torch.inf).all(1)
    leftpad = torch.zeros_like(cache.seqused_k) if cache.leftpad_k is None else cache.leftpad_k
    start = cache.seqused_k - (q.shape[1] + budget.window - 1)
    sink = numbers * cache.page_size < leftpad[:, None] + budget.sinks if budget.sinks else torch.zeros_like(exists)
    forced = exists & (sink | ((numbers + 1) * cache.page_size > start[:, None]))
    wanted = budget.wanted(cache.kv_heads, q.device)
    counts = wanted[0] + (wanted[1] * (stop - first).clamp(min=0)[:, None].float()).ceil()
    optional = (exists & ~forced)[:, None]
    rank = scores.masked_fill(~optional, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    chosen = (optional & (rank < counts[..., None])) | forced[:, None]
    ascending = torch.where(chosen, numbers, cache.max_pages).sort(-1).values[..., : budget.slots(cache, q.shape[1])]
    return torch.where(ascending < cache.max_pages, ascending, -1).int()


def _of_all_ranks(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, x.contiguous(), group=group)
    return found
