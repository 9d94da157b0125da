"""A step of a serving engine: sequences of any length over a paged cache. Knows no engine and no policy.

Pages are (num_pages, kv_heads, page_size, 2 * head_dim), a token's k and v side by side, any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops import sparse_attention
from dynaxx.ops.decode import sparse_decode
from dynaxx.patterns import Causal

DENSE_BLOCK = 64  # of dense layouts


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step, in tokens; its queries are the last of its keys."""

    index: int  # its row of the page table
    start: int  # where its queries begin among the step's tokens
    seqlen_q: int
    seqlen_k: int

    @property
    def tokens(self) -> slice:
        """Its queries among the step's tokens."""
        return slice(self.start, self.start + self.seqlen_q)


class Sequences:
    """The sequences of a step, for layers that read one page table.

    Args:
        page_table: (num_seqs, max_pages) int32, on the device.
        seqused_k: (num_seqs,) int32, keys of each sequence, those of this step included, on the device.
        starts: (num_seqs + 1,) where each sequence's queries begin.
        seqlens_k: `seqused_k` on the host; for sequences with one query an upper bound does.
    """

    def __init__(self, page_table: Tensor, seqused_k: Tensor, starts: Sequence[int], seqlens_k: Sequence[int]) -> None:
        self.page_table = page_table
        self.seqused_k = seqused_k
        self.rows = tuple(
            Row(index, starts[index], starts[index + 1] - starts[index], seqlen_k)
            for index, seqlen_k in enumerate(seqlens_k)
            if starts[index + 1] > starts[index]  # engines pad
        )


def dense_attention(
    q: Tensor, pages: Tensor, sequences: Sequences, rows: Sequence[Row], scale: float, out: Tensor
) -> None:
    """Attend to every visible key; sequences with one query go together.

    Args:
        q: (tokens, q_heads, head_dim), all tokens of the step.
        pages: with the keys of this step.
        out: as q; what belongs to `rows` is written.
    """
    single = [row for row in rows if row.seqlen_q == 1]
    if single:
        at = query_places(single, q.device)
        out[at] = sparse_decode(q[at], paged_cache(pages, sequences, single), scale=scale)
    for row in rows:
        if row.seqlen_q > 1:
            k, v = keys_and_values(pages, sequences.page_table[row.index], row.seqlen_k)
            layout = Causal().layout(row.seqlen_q, row.seqlen_k, block_size=DENSE_BLOCK, device=q.device)
            out[row.tokens] = sparse_attention(q[None, row.tokens], k, v, layout, scale=scale)[0]


def query_places(rows: Sequence[Row], device: torch.device) -> Tensor:
    """(rows, seqlen_q) int64: where the queries of some sequences with as many each are among the step's tokens."""
    starts = torch.tensor([row.start for row in rows]).to(device, non_blocking=True)
    return starts[:, None] + torch.arange(rows[0].seqlen_q, device=device)


def paged_cache(
    pages: Tensor, sequences: Sequences, rows: Sequence[Row], summaries: PageSummaries | None = None
) -> PagedCache:
    """The cache of some sequences, as views."""
    k, v = tokens_first(pages)
    which = torch.tensor([row.index for row in rows]).to(pages.device, non_blocking=True)
    return PagedCache(k, v, sequences.seqused_k[which], sequences.page_table[which], summaries=summaries)


def keys_and_values(pages: Tensor, page_table: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """k and v of one sequence, (1, seqlen_k, kv_heads, head_dim): views of one ordered copy.

    Args:
        page_table: (max_pages,) its row.
    """
    num_pages, heads, page_size, width = pages.shape
    used = page_table[: -(-seqlen_k // page_size)].long()
    if pages.is_contiguous():  # whole pages are copied, each head's behind one another: twice as fast
        order = used * heads + torch.arange(heads, device=used.device)[:, None]
        both = pages.view(num_pages * heads, page_size * width).index_select(0, order.flatten())
    else:
        both = pages[used].transpose(0, 1)
    both = both.reshape(heads, -1, width)[:, :seqlen_k].transpose(0, 1)[None]
    k, v = both.chunk(2, dim=-1)
    return k, v


def write(pages: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store tokens in their pages, on a CPU.

    Args:
        k, v: (tokens, kv_heads, head_dim); rows past the last slot are padding.
        slots: (n,) integers, page * page_size + place in the page; negative ones are padding.
    """
    k, v = k[: len(slots)], v[: len(slots)]
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    at = (slots // pages.shape[2], slots % pages.shape[2])
    to_k, to_v = tokens_first(pages)
    to_k[at], to_v[at] = k, v


def tokens_first(pages: Tensor) -> tuple[Tensor, Tensor]:
    """k and v as (num_pages, page_size, kv_heads, head_dim) views."""
    k, v = pages.transpose(1, 2).chunk(2, dim=-1)
    return k, v
