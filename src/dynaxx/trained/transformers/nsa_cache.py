# SPDX-License-Identifier: Apache-2.0
"""Compressed tokens of a transformers cache, which are valid as long as the cache keeps its tensors."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dynaxx.layout.paging import PagedCache
from dynaxx.trained.nsa.compressed_pages import CompressedPages, compressed_of
from dynaxx.trained.nsa.decode import Pooling, compress_pages
from dynaxx.trained.nsa.spans import NsaSizes

SPARE_BLOCKS = 64  # selection blocks by which the compressed tokens grow at a time


@dataclass
class _CompressedLayer:
    """The compressed tokens of one layer of a cache."""

    compressed: CompressedPages
    keys: weakref.ref[Tensor]  # the compressed tensor
    covered: int  # number of first keys whose windows are compressed


_memories: weakref.WeakKeyDictionary[Any, dict[int, _CompressedLayer]] = weakref.WeakKeyDictionary()


class NsaMemory:
    """One layer's part of a cache's memory, for one call. Create it before the cache appends new keys."""

    def __init__(self, cache: Any, layer: int) -> None:
        self._of, self._layer = _memories.setdefault(cache, {}), layer
        layers = getattr(cache, "layers", ())
        keys = getattr(layers[layer], "keys", None) if layer < len(layers) else None
        known = self._of.pop(layer, None)
        self._known = known if known is not None and keys is not None and known.keys() is keys else None

    def extended(self, keys: Tensor) -> None:
        """Make `keys`, the previous keys with new ones appended, the cache's tensor."""
        if self._known is not None:
            self._of[self._layer] = replace(self._known, keys=weakref.ref(keys))

    @torch.no_grad()
    def pages(
        self, keys: Tensor, values: Tensor, sizes: NsaSizes, compress_k: Pooling, compress_v: Pooling
    ) -> PagedCache:
        """Return the cache's (batch, kv_heads, seqlen, dim) tensors in the form for `nsa_decode`."""
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
        self._of[self._layer] = _CompressedLayer(compressed_of(cache), weakref.ref(keys), used)
        return cache
