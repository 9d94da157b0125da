# SPDX-License-Identifier: Apache-2.0
"""A step of a serving engine: sequences of any length over a paged cache. Knows no engine and no policy.

Memory is (num_pages, kv_heads, page_size, 2 * head_dim), a token's k and v side by side, any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.integrations.runtime.routing import MOST_QUERIES
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.lazy import lazy
from dynaxx.ops import sparse_attention
from dynaxx.ops.decode import sparse_decode
from dynaxx.patterns import Causal

DENSE_BLOCK = 64  # of dense layouts
FP8 = torch.float8_e4m3fn


class Pages(NamedTuple):
    """An engine's cache of one layer. In fp8 (e4m3) it holds keys and values divided by their scales."""

    memory: Tensor  # (num_pages, kv_heads, page_size, 2 * head_dim), any strides but a dense last dimension
    k_scale: Tensor | None = None  # fp32, () or (kv_heads,); none if the memory is not in fp8
    v_scale: Tensor | None = None

    @classmethod
    def of(cls, memory: Tensor, k_scale: Tensor, v_scale: Tensor) -> Pages:
        """Of memory that has no scales unless it is of bytes; one scale may be any tensor of one element."""
        if memory.dtype.itemsize > 1:
            return cls(memory)
        own = [x.float().reshape(() if x.numel() == 1 else -1) for x in (k_scale, v_scale)]
        return cls(memory.view(FP8), *own)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.memory.shape[2]

    def tokens_first(self) -> tuple[Tensor, Tensor]:
        """k and v as (num_pages, page_size, kv_heads, head_dim) views, as stored."""
        k, v = self.memory.transpose(1, 2).chunk(2, dim=-1)
        return k, v

    def cache(self, seqused_k: Tensor, page_table: Tensor, summaries: PageSummaries | None = None) -> PagedCache:
        """As `sparse_decode` takes it."""
        k, v = self.tokens_first()
        return PagedCache(k, v, seqused_k, page_table, k_scale=self.k_scale, v_scale=self.v_scale, summaries=summaries)


class Softmax(NamedTuple):
    """A layer's softmax: the same of sparse and dense attention, whatever the model has."""

    scale: float
    softcap: float | None = None  # caps scores, as in Gemma 2
    sinks: Tensor | None = None  # (q_heads,) a logit that joins each denominator, as in gpt-oss

    @property
    def arguments(self) -> dict[str, Any]:
        """As `sparse_attention` and `sparse_decode` take them."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}


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
        self._parts: dict[tuple[tuple[Row, ...], int], Part] = {}
        self.rows = tuple(
            Row(index, starts[index], starts[index + 1] - starts[index], seqlen_k)
            for index, seqlen_k in enumerate(seqlens_k)
            if starts[index + 1] > starts[index]  # engines pad
        )

    def part(self, rows: Sequence[Row], batch: int = 0) -> Part:
        """Return some sequences with the same number of queries; layers share what is made once.

        Args:
            batch: sequences without keys follow up to so many.
        """
        key = (tuple(rows), max(batch, len(rows)))
        found = self._parts.get(key)
        if found is None:
            padding = key[1] - len(rows)
            numbers = [(row.index, row.start) for row in rows] + [(rows[0].index, rows[0].start)] * padding
            which, starts = on_device(numbers, self.page_table.device).T
            seqused_k = self.seqused_k[which]
            if padding:
                seqused_k[len(rows) :] = 0
            places = starts[:, None] + torch.arange(rows[0].seqlen_q, device=starts.device)
            found = self._parts[key] = Part(seqused_k, self.page_table[which], places)
        return found

    @lazy
    def with_new_keys(self) -> list[tuple[Part, int]]:
        """All sequences in parts, each with the most keys that a sequence of it gains in this step: decoding ones
        together, and every chunk of a prompt alone."""
        steps = [row for row in self.rows if row.seqlen_q < MOST_QUERIES]
        chunks = [[row] for row in self.rows if row.seqlen_q >= MOST_QUERIES]
        return [(self.part(some), max(row.seqlen_q for row in some)) for some in (steps, *chunks) if some]


class Part(NamedTuple):
    """Some sequences of a step, as kernels take them."""

    seqused_k: Tensor  # (batch,) int32
    page_table: Tensor  # (batch, max_pages) int32
    places: Tensor  # (batch, seqlen_q) int64, where their queries are among the step's tokens

    def cache(self, pages: Pages, summaries: PageSummaries | None = None) -> PagedCache:
        """Return their cache in one layer."""
        return pages.cache(self.seqused_k, self.page_table, summaries)


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """Return numbers of the host on a device; from pinned memory, since copies from other memory wait for the GPU."""
    host = torch.as_tensor(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def dense_attention(
    q: Tensor, pages: Pages, sequences: Sequences, rows: Sequence[Row], softmax: Softmax, out: Tensor
) -> None:
    """Attend to every visible key; sequences with one query go together.

    Args:
        q: (tokens, q_heads, head_dim), all tokens of the step.
        pages: with the keys of this step.
        out: as q; what belongs to `rows` is written.
    """
    single = [row for row in rows if row.seqlen_q == 1]
    if single:
        part = sequences.part(single)
        out[part.places] = sparse_decode(q[part.places], part.cache(pages), **softmax.arguments)
    for row in rows:
        if row.seqlen_q > 1:
            k, v = keys_and_values(pages, sequences.page_table[row.index], row.seqlen_k, q.dtype)
            layout = Causal().layout(row.seqlen_q, row.seqlen_k, block_size=DENSE_BLOCK, device=q.device)
            out[row.tokens] = sparse_attention(q[None, row.tokens], k, v, layout, **softmax.arguments)[0]


def keys_and_values(pages: Pages, page_table: Tensor, seqlen_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v of one sequence, (1, seqlen_k, kv_heads, head_dim): views of one ordered copy, or in `dtype` if that of
    the memory is fp8.

    Args:
        page_table: (max_pages,) its row.
    """
    memory = pages.memory if pages.k_scale is None else pages.memory.view(torch.uint8)  # not all is done with fp8
    num_pages, heads, page_size, width = memory.shape
    used = page_table[: -(-seqlen_k // page_size)].long()
    if memory.is_contiguous():  # whole pages are copied, each head's behind one another: twice as fast
        order = used * heads + torch.arange(heads, device=used.device)[:, None]
        both = memory.view(num_pages * heads, page_size * width).index_select(0, order.flatten())
    else:
        both = memory[used].transpose(0, 1)
    both = both.reshape(heads, -1, width)[:, :seqlen_k].transpose(0, 1)[None]
    k, v = both.chunk(2, dim=-1)
    if pages.k_scale is None or pages.v_scale is None:
        return k, v
    k, v = (x.view(FP8).to(dtype).mul_(scale[..., None]) for x, scale in ((k, pages.k_scale), (v, pages.v_scale)))
    return k, v


def write(pages: Pages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store tokens in their pages, on a CPU.

    Args:
        k, v: (tokens, kv_heads, head_dim); rows past the last slot are padding.
        slots: (n,) integers, page * page_size + place in the page; negative ones are padding.
    """
    k, v = k[: len(slots)], v[: len(slots)]
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    at = (slots // pages.page_size, slots % pages.page_size)
    to_k, to_v = pages.tokens_first()
    to_k[at], to_v[at] = stored(k, pages.k_scale), stored(v, pages.v_scale)


def stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """Keys or values, (tokens, kv_heads, head_dim), as the cache has them."""
    if scale is None:
        return x
    most = torch.finfo(FP8).max
    return (x / scale[..., None]).clamp(-most, most).to(FP8)
