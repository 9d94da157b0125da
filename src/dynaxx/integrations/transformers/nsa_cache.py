# SPDX-License-Identifier: Apache-2.0
"""Compressed tokens of a transformers cache, kept as long as its tensors are those that they came from."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dynaxx.layout.compressed import CompressedPages
from dynaxx.layout.nsa import NativeSizes
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.nsa_decode import Pooling, compress_pages

SPARE_BLOCKS = 64  # compressed tokens grow by those of so many selection blocks at a time


@dataclass
class _LayerMemory:
    """What is known of one layer of a cache."""

    compressed: CompressedPages
    keys: weakref.ref[Tensor]  # the tensor that the layer had then
    covered: int  # keys, from the first on, whose windows are compressed


_memories: weakref.WeakKeyDictionary[Any, dict[int, _LayerMemory]] = weakref.WeakKeyDictionary()


class NativeMemory:
    """One layer's part of a cache's memory, for one call. Made before the cache takes in new keys."""

    def __init__(self, cache: Any, layer: int) -> None:
        self._of, self._layer = _memories.setdefault(cache, {}), layer
        layers = getattr(cache, "layers", ())
        keys = getattr(layers[layer], "keys", None) if layer < len(layers) else None
        known = self._of.pop(layer, None)
        self._known = known if known is not None and keys is not None and known.keys() is keys else None

    def extended(self, keys: Tensor) -> None:
        """Make `keys` the cache's tensor from now on: what it had before and some more."""
        if self._known is not None:
            self._of[self._layer] = replace(self._known, keys=weakref.ref(keys))

    @torch.no_grad()
    def pages(
        self, keys: Tensor, values: Tensor, sizes: NativeSizes, compress_k: Pooling, compress_v: Pooling
    ) -> PagedCache:
        """Return the cache's (batch, kv_heads, seqlen, dim) tensors as `native_decode` reads them."""
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        cache, used, known = PagedCache.contiguous(k, v, page_size=sizes.slc_block), k.shape[1], self._known
        if known is None or known.compressed.sizes.cmp_stride != sizes.cmp_stride:
            cache = compress_pages(cache, sizes, compress_k, compress_v)
        else:
            kept, positions = known.compressed, used // sizes.cmp_stride
            if kept.k.shape[1] < positions:
                kept = kept.grown(positions + SPARE_BLOCKS * sizes.slc_block // sizes.cmp_stride)
            cache = replace(cache, compressed=replace(kept, sizes=sizes))
            cache = compress_pages(cache, sizes, compress_k, compress_v, new_tokens=used - known.covered)
        assert cache.compressed is not None, "just made"
        self._of[self._layer] = _LayerMemory(cache.compressed, weakref.ref(keys), used)
        return cache
