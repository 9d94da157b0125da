# SPDX-License-Identifier: Apache-2.0
"""`LayerCache`: the keys and values of one layer during generation, as pages or as views."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.packed import CuSeqlens, host_lengths
from dynaxx.layout.paging import PagedCache
from dynaxx.layout.paging.pages import PAGE_SIZES
from dynaxx.trained.nsa.compressed_pages import CompressedPages, compressed_of
from dynaxx.trained.nsa.decode import Pooling, compress_pages
from dynaxx.trained.nsa.spans import NsaSizes


@typed
class LayerCache:
    """The keys and values of one layer, and the compressed tokens computed so far. It grows by doubling.

    Decoding reads it as a `PagedCache`. Sequences have different lengths if their prompts were packed.

    Args:
        capacity: initial room in tokens.
        reselect_every: number of one-token steps that share a choice of blocks. With 1, each token chooses, which is
            exact. Larger values are an approximation: steps reuse the selected blocks of the step that chose, while
            forced blocks always follow the current token.
    """

    def __init__(self, capacity: int = 256, *, reselect_every: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"`capacity` must be >= 1 token, got {capacity}")
        if reselect_every < 1:
            raise ValueError(f"`reselect_every` must be >= 1 step, got {reselect_every}")
        self.capacity, self.reselect_every = capacity, reselect_every
        self.lengths: list[int] = []
        self._k = self._v = torch.empty(
            0, dtype=torch.float32, device="cpu"
        )  # (batch, room, kv_heads, dim), whole pages
        self._compressed: CompressedPages | None = None  # laid out as for a contiguous cache
        self._new = 0  # largest number of tokens in a sequence that are not compressed yet
        self._blocks: Tensor | None = None  # the last choice of a one-token step
        self._age = 0  # steps since that choice

    @property
    def even(self) -> bool:
        """Return whether all sequences have the same length."""
        return len(set(self.lengths)) <= 1

    def check_even(self) -> None:
        """Raise ValueError if sequences have different lengths."""
        if not self.even:
            raise ValueError(
                "only NativeSparseAttention without `dense` serves sequences of different lengths; pad them or use it"
            )

    def append(self, k: Tensor, v: Tensor, ends: CuSeqlens | None = None) -> None:
        """Append (batch, tokens, kv_heads, dim) keys and values. Packed ones (tokens, ...) with `ends` start sequences.

        Raises:
            ValueError: the batch, the heads or the head_dim differ from the cache's, packed tensors follow other
                tokens, or tensors need gradients. The cache is unchanged.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("a cache serves inference: call the model under torch.no_grad() or inference_mode()")
        if ends is not None:
            if self.lengths:
                raise ValueError("packed input must come first in a cache; pass later steps as (batch, tokens, hidden)")
            parts = list(pairwise(host_lengths("cu_seqlens", ends)))
            added, batch = [b - a for a, b in parts], len(parts)
        else:
            batch, added = k.shape[0], [k.shape[1]] * k.shape[0]
        if self.lengths and batch != len(self.lengths):
            raise ValueError(f"`k` must have the cache's batch size {len(self.lengths)}, got {batch}")
        if k.ndim != v.ndim or k.shape[:-1] != v.shape[:-1]:
            raise ValueError(f"`k` and `v` may differ in head_dim only, got {tuple(k.shape)} and {tuple(v.shape)}")
        if self._k.ndim > 1:
            wanted, found = ([tuple(x.shape[-2:]) for x in pair] for pair in ((self._k, self._v), (k, v)))
            if wanted != found:
                raise ValueError(
                    f"`k` and `v` must have the (kv_heads, head_dim) of the cache, {wanted}, got {found}: "
                    "every layer needs a cache of its own"
                )
        before = self.lengths or [0] * batch
        self.lengths = [old + new for old, new in zip(before, added, strict=True)]
        self._make_room(k, v, batch)
        for kept, x in ((self._k, k), (self._v, v)):
            if ends is None and len(set(before)) <= 1:
                kept[:, slice(*(min(some, default=0) for some in (before, self.lengths)))] = x
                continue
            for b, (begin, end) in enumerate(zip(before, self.lengths, strict=True)):
                kept[b, begin:end] = x[b] if ends is None else x[slice(*parts[b])]
        self._new += max(added, default=0)
        if added != [1] * batch:
            self._blocks = None

    def views(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, (batch, seqlen, kv_heads, dim), without a copy.

        Raises:
            ValueError: the sequences have different lengths.
        """
        self.check_even()
        length = max(self.lengths, default=0)
        return self._k[:, :length], self._v[:, :length]

    def compressed_views(self, sizes: NsaSizes, compress_k: Pooling, compress_v: Pooling) -> tuple[Tensor, Tensor]:
        """Return all compressed keys and values, (batch, compressed tokens, kv_heads, dim), for equal lengths."""
        kept = compressed_of(self.pages(sizes, compress_k, compress_v))
        some = slice(kept.hidden, kept.hidden + sizes.compressed(max(self.lengths, default=0)))
        view = lambda x: x.unflatten(0, (len(self.lengths), -1)).flatten(1, 2)[:, some]
        return view(kept.k), view(kept.v)

    def pages(self, sizes: NsaSizes, compress_k: Pooling, compress_v: Pooling) -> PagedCache:
        """Return the cache for `nsa_decode`: one page per selection block, with every whole window compressed."""
        batch, room = self._k.shape[:2]
        kept = self._compressed
        if kept is None or (kept.sizes.cmp_block, kept.sizes.cmp_stride) != (sizes.cmp_block, sizes.cmp_stride):
            fresh = lambda x: x.new_zeros(batch, room // sizes.cmp_stride, *x.shape[2:])
            kept, self._new = CompressedPages(fresh(self._k), fresh(self._v), sizes), max(self.lengths, default=0)
        self._compressed = CompressedPages(kept.k, kept.v, sizes)
        per_page = lambda x, size: x.unflatten(1, (-1, size)).flatten(0, 1)
        count, size_cmp = room // sizes.slc_block, sizes.slc_block // sizes.cmp_stride
        cache = PagedCache(
            per_page(self._k, sizes.slc_block),
            per_page(self._v, sizes.slc_block),
            torch.tensor(self.lengths, dtype=torch.int32, device="cpu").to(self._k.device, non_blocking=True),
            torch.arange(batch * count, dtype=torch.int32, device=self._k.device).view(batch, count),
            compressed=CompressedPages(per_page(kept.k, size_cmp), per_page(kept.v, size_cmp), sizes),
        )
        compress_pages(cache, sizes, compress_k, compress_v, new_tokens=self._new)
        self._new = 0
        return cache

    def blocks(self) -> Tensor | None:
        """Return the blocks that this step reuses from an earlier step, or None if it must choose."""
        return self._blocks if self._age + 1 < self.reselect_every else None

    def keep_blocks(self, blocks: Tensor) -> None:
        """Store the choice of a step, or count a step that reused it."""
        if self.blocks() is None:
            self._blocks, self._age = blocks if blocks.shape[1] == 1 else None, 0
        else:
            self._age += 1

    @typed
    def reorder(self, index: Tensor) -> None:
        """Keep the sequences `index`, in that order and with repetitions, as beam search needs."""
        self.lengths = [self.lengths[i] for i in index.tolist()]
        index = index.to(self._k.device)
        self._k, self._v = self._k[index], self._v[index]
        if self._compressed is not None:
            kept = self._compressed
            self._compressed = CompressedPages(kept.k[index], kept.v[index], kept.sizes)
        if self._blocks is not None:
            self._blocks = self._blocks[index]

    def _make_room(self, k: Tensor, v: Tensor, batch: int) -> None:
        longest, known = max(self.lengths, default=0), self._k.ndim > 1
        if known and longest <= self._k.shape[1]:
            return
        room = -(-max(self.capacity, 1 << max(0, longest - 1).bit_length()) // PAGE_SIZES[-1]) * PAGE_SIZES[-1]
        grown = lambda kept, x, room: _grown(kept if known else None, x.new_empty(batch, room, *x.shape[-2:]))
        self._k, self._v = grown(self._k, k, room), grown(self._v, v, room)
        if self._compressed is not None:
            kept = self._compressed
            few = room // kept.sizes.cmp_stride
            self._compressed = CompressedPages(grown(kept.k, k, few), grown(kept.v, v, few), kept.sizes)


def _grown(kept: Tensor | None, room: Tensor) -> Tensor:
    """Return `room` with the kept values copied to its start."""
    if kept is not None:
        room[:, : kept.shape[1]] = kept
    return room
