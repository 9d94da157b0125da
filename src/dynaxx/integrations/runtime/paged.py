# SPDX-License-Identifier: Apache-2.0
"""A step of a serving engine: sequences of any length over a paged cache. Independent of engine and policy.

vLLM's cache has shape (num_pages, kv_heads, page_size, 2 * head_dim), with k and v of a token side by side, and any
strides: `Pages`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.integrations.runtime.routing import MAX_QUERIES
from dynaxx.layout.paging import (
    PagedCache,
    PageSummaries,
    SequenceKeys,
    divided_pages,
    divided_table,
    places_of,
    rows_of,
)
from dynaxx.layout.paging.in_place import MovedLayouts
from dynaxx.layout.paging.pages import PAGE_SIZES
from dynaxx.lazy import lazy
from dynaxx.ops import sparse_attention
from dynaxx.ops.decode import sparse_decode
from dynaxx.patterns import Causal

DENSE_BLOCK = 64  # block size of dense layouts
FP8 = torch.float8_e4m3fn


class Pages(NamedTuple):
    """An engine's cache of one layer. In fp8 (e4m3) it holds keys and values divided by their scales."""

    memory: Tensor  # (num_pages, kv_heads, page_size, 2 * head_dim), last dimension contiguous, other strides free
    k_scale: Tensor | None = None  # fp32, () or (kv_heads,); None if the memory is not fp8
    v_scale: Tensor | None = None
    whole: Tensor | None = None  # the engine's memory, if `memory` divides its pages

    @classmethod
    def of(cls, memory: Tensor, k_scale: Tensor, v_scale: Tensor) -> Pages:
        """Return the cache of `memory`. Scales apply to fp8 memory only; a single scale may have any shape."""
        if memory.dtype.itemsize > 1:
            return cls(memory)
        own = [x.float().reshape(() if x.numel() == 1 else -1) for x in (k_scale, v_scale)]
        return cls(memory.view(FP8), *own)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.memory.shape[2]

    def divided(self, page_size: int) -> Pages:
        """Return the same memory in smaller pages, among which a decode rule chooses; see `Sequences.over`.

        Raises:
            ValueError: see `divided_pages`.
        """
        if page_size == self.page_size:
            return self
        memory = divided_pages(self.memory.transpose(1, 2), page_size)[0].transpose(1, 2)
        return self._replace(memory=memory, whole=self.memory)

    def places(self, page_table: Tensor) -> Tensor:
        """Return the page table (batch, max_pages) int32 of pages that `divided` made, from that of the whole pages."""
        assert self.whole is not None, "the pages are not divided"
        whole = self.whole.transpose(1, 2)
        return divided_table(page_table, whole, divided_pages(whole, self.page_size)[1], self.page_size)

    def tokens_first(self) -> tuple[Tensor, Tensor]:
        """Return k and v as views (num_pages, page_size, kv_heads, head_dim) of the memory."""
        k, v = self.memory.transpose(1, 2).chunk(2, dim=-1)
        return k, v

    def cache(self, seqused_k: Tensor, page_table: Tensor, summaries: PageSummaries | None = None) -> PagedCache:
        """Return the cache for `sparse_decode`; seqused_k (batch,) and page_table (batch, max_pages), both int32.

        Pages of a size that kernels lack, as 48 or 272, are read as the largest parts that they have.
        """
        if self.page_size not in PAGE_SIZES:
            smaller = self.divided(math.gcd(self.page_size, max(PAGE_SIZES)))  # sizes are powers of two
            return smaller.cache(seqused_k, smaller.places(page_table), summaries)
        k, v = self.tokens_first()
        return PagedCache(k, v, seqused_k, page_table, k_scale=self.k_scale, v_scale=self.v_scale, summaries=summaries)

    @property
    def read_in_place(self) -> bool:
        """Return whether kernels may read sequences where the pages are."""
        return self.k_scale is None

    def sequence(self, page_table: Tensor, seqlen_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return k and v of one sequence, each (1, seqlen_k, kv_heads, head_dim), as views of one contiguous copy.

        Args:
            page_table: (max_pages,) the sequence's row of the page table.
            seqlen_k: number of keys.
            dtype: dtype of the result for fp8 memory; other memory keeps its dtype.
        """
        memory = self.memory if self.k_scale is None else self.memory.view(torch.uint8)  # fp8 lacks some operations
        num_pages, heads, page_size, width = memory.shape
        used = page_table[: -(-seqlen_k // page_size)].long()
        if memory.is_contiguous():  # copying whole pages of each head is twice as fast
            order = used * heads + torch.arange(heads, device=used.device)[:, None]
            both = memory.view(num_pages * heads, page_size * width).index_select(0, order.flatten())
        else:
            both = memory[used].transpose(0, 1)
        both = both.reshape(heads, -1, width)[:, :seqlen_k].transpose(0, 1)[None]
        k, v = both.chunk(2, dim=-1)
        if self.k_scale is None or self.v_scale is None:
            return k, v
        k, v = (x.view(FP8).to(dtype).mul_(scale[..., None]) for x, scale in ((k, self.k_scale), (v, self.v_scale)))
        return k, v


class Softmax(NamedTuple):
    """The softmax of a layer, equal for sparse and dense attention."""

    scale: float
    softcap: float | None = None  # cap on scores, as in Gemma 2
    sinks: Tensor | None = None  # (q_heads,) logits added to the denominators, as in gpt-oss

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `sparse_attention` and `sparse_decode`."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """One sequence of a step, in tokens. Its queries are the last of its keys."""

    index: int  # row of the page table
    start: int  # index of its first query among the step's tokens
    seqlen_q: int
    seqlen_k: int
    of_prompt: bool = False  # whether the engine says that the queries are a prompt's, however few they are

    @property
    def tokens(self) -> slice:
        """The slice of its queries among the step's tokens."""
        return slice(self.start, self.start + self.seqlen_q)


class Sequences:
    """The sequences of a step, for layers that share a page table.

    Args:
        page_table: (num_seqs, max_pages) int32, on the device.
        seqused_k: (num_seqs,) int32 number of keys of each sequence, including those of this step, on the device.
        starts: (num_seqs + 1,) index of each sequence's first query.
        seqlens_k: `seqused_k` on the host; for sequences with one query an upper bound suffices.
        of_prompt: whether each sequence's queries are a prompt's, if the engine says it.
    """

    def __init__(
        self,
        page_table: Tensor,
        seqused_k: Tensor,
        starts: Sequence[int],
        seqlens_k: Sequence[int],
        of_prompt: Sequence[bool] | None = None,
    ) -> None:
        self.page_table = page_table
        self.seqused_k = seqused_k
        self._parts: dict[tuple[tuple[SequenceRow, ...], int], Part] = {}
        self._divided: dict[Hashable, Sequences] = {}
        self._places: dict[tuple[int, int, int, int], tuple[Tensor, MovedLayouts]] = {}
        self.rows = tuple(
            SequenceRow(
                index,
                starts[index],
                starts[index + 1] - starts[index],
                seqlen_k,
                of_prompt is not None and of_prompt[index],
            )
            for index, seqlen_k in enumerate(seqlens_k)
            if starts[index + 1] > starts[index]  # skip padding
        )

    def over(self, pages: Pages, *, anew: bool = False) -> Sequences:
        """Return the same sequences over pages that `Pages.divided` made. The result is cached for the other layers.

        Args:
            pages: the cache of one layer.
            anew: compute the page table again, so that a graph which is being captured contains it.
        """
        if pages.whole is None:
            return self
        key = (pages.whole.shape[2:], pages.whole.stride(), pages.page_size)
        if anew or key not in self._divided:
            self._divided[key] = Sequences(pages.places(self.page_table), self.seqused_k, [], [])
            self._divided[key].rows = self.rows
        return self._divided[key]

    def part(self, rows: Sequence[SequenceRow], batch: int = 0) -> Part:
        """Return some sequences with equal numbers of queries. The result is cached, so that layers share it.

        Args:
            rows: the sequences.
            batch: pad to this batch size with sequences without keys.
        """
        key = (tuple(rows), max(batch, len(rows)))
        found = self._parts.get(key)
        if found is None and key[1] == 1:  # a chunk of a prompt: views instead of copies of numbers to the device
            row, device = rows[0], self.page_table.device
            used, table = (_aligned(x[row.index : row.index + 1]) for x in (self.seqused_k, self.page_table))
            places = torch.arange(row.start, row.start + row.seqlen_q, device=device)[None]
            found = self._parts[key] = Part(used, table, places)
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

    def keys(self, pages: Pages, row: SequenceRow, dtype: torch.dtype) -> SequenceKeys:
        """Return copies of a sequence's keys and values in one layer, in order."""
        k, v = pages.sequence(self.page_table[row.index], row.seqlen_k, dtype)
        return SequenceKeys(k, v, row.seqlen_k)

    def keys_in_place(self, pages: Pages, row: SequenceRow, kv_block: int) -> SequenceKeys | None:
        """Return a sequence's keys and values in one layer where the pages are, for kernels that read whole blocks.

        Call `clear_tail` before a kernel reads values.

        Args:
            pages: the cache.
            row: the sequence.
            kv_block: tokens of a block.

        Returns:
            The keys and values; None if pages are no whole number of blocks, or memory is not read as it is.
        """
        page_size = pages.page_size
        if not pages.read_in_place or page_size % kv_block:
            return None
        k, v = pages.tokens_first()
        found, values = rows_of(k), rows_of(v)
        if found is None or values is None or found[1] != values[1]:
            return None
        places, kept = self._places_of(row, page_size, found[1], kv_block)
        return SequenceKeys(found[0], values[0], row.seqlen_k, places, kept)

    def clear_tail(self, pages: Pages, row: SequenceRow) -> None:
        """Set values behind a sequence's last key to zero in one layer, in the rest of its last page.

        Masked weights are zero, but zero times an infinite value of a former sequence is not. No other sequence reads
        that page, since it is not full.
        """
        full, tail = divmod(row.seqlen_k, pages.page_size)
        if tail:
            last = self.page_table[row.index, full].reshape(1).long()
            pages.tokens_first()[1][:, tail:].index_fill_(0, last, 0)

    def _places_of(self, row: SequenceRow, page_size: int, step: int, kv_block: int) -> tuple[Tensor, MovedLayouts]:
        """Return where the blocks of a sequence are, and the layouts moved there. Layers share both."""
        key = (row.index, page_size, step, kv_block)
        if key not in self._places:
            used = self.page_table[row.index, : -(-row.seqlen_k // page_size)]
            blocks = -(-row.seqlen_k // kv_block)
            self._places[key] = places_of(used, page_size, step, kv_block)[:blocks], {}
        return self._places[key]

    @lazy
    def with_new_keys(self) -> list[tuple[Part, int]]:
        """Return all sequences in parts, each with an upper bound of the keys that a sequence gains in this step.

        Decoding sequences form one part, and every chunk of a prompt is a part. Bounds are powers of two, so that
        prompts of many lengths repeat the launches of few.
        """
        steps = [row for row in self.rows if row.seqlen_q < MAX_QUERIES]
        chunks = [[row] for row in self.rows if row.seqlen_q >= MAX_QUERIES]
        bound = lambda rows: 1 << (max(row.seqlen_q for row in rows) - 1).bit_length()
        return [(self.part(some), bound(some)) for some in (steps, *chunks) if some]


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a copy if its address is no multiple of 16 bytes, for which Triton would compile other kernels."""
    return x.clone() if x.data_ptr() % 16 else x


class Part(NamedTuple):
    """Some sequences of a step, in the form that kernels expect."""

    seqused_k: Tensor  # (batch,) int32
    page_table: Tensor  # (batch, max_pages) int32
    places: Tensor  # (batch, seqlen_q) int64 indices of their queries among the step's tokens

    def cache(self, pages: Pages, summaries: PageSummaries | None = None) -> PagedCache:
        """Return the cache of these sequences in one layer."""
        return pages.cache(self.seqused_k, self.page_table, summaries)


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """Copy numbers to a device, through pinned memory, since copies from other memory synchronize with the GPU."""
    host = torch.as_tensor(numbers, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def dense_attention(
    q: Tensor, pages: Pages, sequences: Sequences, rows: Sequence[SequenceRow], softmax: Softmax, out: Tensor
) -> None:
    """Attend to every visible key. Sequences with one query run in one call.

    Args:
        q: (tokens, q_heads, head_dim), all tokens of the step.
        pages: the cache, including the keys of this step.
        sequences: the sequences of the step.
        rows: the sequences to compute.
        softmax: the softmax of the layer.
        out: output of the shape of q; the tokens of `rows` are written.
    """
    single = [row for row in rows if row.seqlen_q == 1]
    if single:
        part = sequences.part(single)
        out[part.places] = sparse_decode(q[part.places], part.cache(pages), **softmax.arguments)
    for row in rows:
        if row.seqlen_q > 1:
            k, v = pages.sequence(sequences.page_table[row.index], row.seqlen_k, q.dtype)
            layout = Causal().layout(row.seqlen_q, row.seqlen_k, block_size=DENSE_BLOCK, device=q.device)
            out[row.tokens] = sparse_attention(q[None, row.tokens], k, v, layout, **softmax.arguments)[0]


def write(pages: Pages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store tokens in their pages, on a CPU.

    Args:
        pages: the cache.
        k: (tokens, kv_heads, head_dim); tokens past the last slot are padding.
        v: (tokens, kv_heads, head_dim).
        slots: (n,) integers, page * page_size + index in the page; negative values are padding.
    """
    k, v = k[: len(slots)], v[: len(slots)]
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    at = (slots // pages.page_size, slots % pages.page_size)
    to_k, to_v = pages.tokens_first()
    to_k[at], to_v[at] = stored(k, pages.k_scale), stored(v, pages.v_scale)


def stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return keys or values, (tokens, kv_heads, head_dim), in the dtype and scale of the cache."""
    if scale is None:
        return x
    most = torch.finfo(FP8).max
    return (x / scale[..., None]).clamp(-most, most).to(FP8)
