# SPDX-License-Identifier: Apache-2.0
"""`SparseAttention`: self-attention over a static pattern."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import BLOCK_SIZES, CuSeqlens
from dynaxx.ops.attention import sparse_attention
from dynaxx.ops.library import number_of
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.packed import packed_layout
from dynaxx.trained.nn.cache import LayerCache
from dynaxx.trained.nn.projection import ProjectedAttention, attend_pattern
from dynaxx.trained.nsa.attention import compress, select_nsa
from dynaxx.trained.nsa.branches import compressed_attention
from dynaxx.trained.nsa.spans import NsaSizes
from dynaxx.trained.packing import pack
from dynaxx.trained.selected import attend_selected


@typed
class SparseAttention(ProjectedAttention):
    """Causal self-attention over a pattern. Set `module.dense = True` for a dense warm-up.

    Args:
        hidden_size: see `ProjectedAttention`.
        q_heads: see `ProjectedAttention`.
        kv_heads: see `ProjectedAttention`.
        pattern: the keys that each query sees.
        block_size: tokens per block of the layout: 16, 32, 64 or 128.
        **projection: other arguments of `ProjectedAttention`.
    """

    def __init__(
        self,
        hidden_size: int,
        q_heads: int,
        kv_heads: int,
        *,
        pattern: Pattern,
        block_size: int = 64,
        **projection: Any,
    ) -> None:
        super().__init__(hidden_size, q_heads, kv_heads, **projection)
        if not isinstance(pattern, Pattern):
            raise TypeError(f"`pattern` must be a pattern such as dynaxx.SlidingWindow(512), got {pattern!r}")
        self.pattern, self.block_size = pattern, block_size

    @property
    def pattern(self) -> Pattern:
        """The keys that each query sees."""
        return self._pattern

    @pattern.setter
    def pattern(self, pattern: Pattern) -> None:
        self._pattern, self._number = pattern, number_of(pattern)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled module, whose pattern may have another number in this process."""
        state = dict(state)
        pattern = state.pop("pattern", None) or state.pop("_pattern")
        super().__setstate__(state)
        self.pattern = pattern

    @override
    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: LayerCache | None
    ) -> Tensor:
        if cu_seqlens is not None:
            packed = packed_layout(self.pattern, cu_seqlens, block_size=self.block_size, device=q.device)
            return sparse_attention(q, k, v, packed, scale=self.scale)
        return attend_pattern(q, k, v, self.pattern, self._number, self.block_size, self.scale)

    def is_traceable(self, cu_seqlens: CuSeqlens | None, cache: LayerCache | None) -> bool:
        """Return whether `torch.compile` can trace the call: a batch, whose layout depends on the lengths only."""
        return cu_seqlens is None and cache is None


SWITCHABLE_SIZES = NsaSizes(slc_count=96, first_blocks=1, local_blocks=32)  # 1 sink, 32 local, 63 selected blocks


@typed
class SwitchableAttention(ProjectedAttention):
    """InfLLM-V2 (arXiv 2509.24663): each query attends to the first, the last and the best-scored blocks.

    A block's score is the best score of the mean keys that overlap it. The module has no parameters besides the
    projections, so it can replace the attention of a dense model. Up to slc_count * slc_block tokens every block is
    selected; the module then runs dense attention, which gives the same result.

    Args:
        hidden_size: see `ProjectedAttention`.
        q_heads: see `ProjectedAttention`.
        kv_heads: see `ProjectedAttention`.
        sizes: `cmp_block` and `cmp_stride` of the mean keys, `slc_block`, and `slc_count` blocks per query, of which
            `first_blocks` and `local_blocks` are forced. `window` is not used; `pool` is always "max".
        **projection: other arguments of `ProjectedAttention`.
    """

    def __init__(
        self, hidden_size: int, q_heads: int, kv_heads: int, *, sizes: NsaSizes | None = None, **projection: Any
    ) -> None:
        super().__init__(hidden_size, q_heads, kv_heads, **projection)
        self.sizes = replace(sizes or SWITCHABLE_SIZES, pool="max")

    @override
    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: LayerCache | None
    ) -> Tensor:
        spans, packed = pack(q, k, v, self.sizes, cu_seqlens, None)
        if max((b - a for a, b in pairwise(spans.ends_k)), default=0) <= self.sizes.slc_count * self.sizes.slc_block:
            return self.attend_dense(q, k, v, cu_seqlens)
        with torch.no_grad():
            k_cmp = compress(packed.k, self.sizes, cu_seqlens=spans.ends_k)
            _, lse = compressed_attention(packed, k_cmp, k_cmp, spans, self.scale, "auto")
            indices = select_nsa(packed.q, k_cmp, lse, spans, scale=self.scale)
        out, _ = attend_selected(packed.q, packed.k, packed.v, indices, spans, self.scale, "auto")
        return packed.unpack(out)


@typed
class MixtureOfBlockAttention(ProjectedAttention):
    """Mixture of Block Attention (MoBA, arXiv 2502.13189). It has no parameters besides the projections.

    Args:
        hidden_size: see `ProjectedAttention`.
        q_heads: see `ProjectedAttention`.
        kv_heads: see `ProjectedAttention`.
        block_size: tokens per block: 16, 32, 64 or 128.
        top_k: number of blocks per query, its own block included.
        **projection: other arguments of `ProjectedAttention`.
    """

    def __init__(
        self, hidden_size: int, q_heads: int, kv_heads: int, *, block_size: int = 128, top_k: int = 8, **projection: Any
    ) -> None:
        super().__init__(hidden_size, q_heads, kv_heads, **projection)
        if top_k < 1:
            raise ValueError(f"`top_k` must be >= 1 blocks, the query's own included, got {top_k}")
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"`block_size` must be one of {BLOCK_SIZES}, got {block_size}")
        self.sizes = NsaSizes(block_size, block_size, block_size, top_k, first_blocks=0, local_blocks=1)

    @override
    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: LayerCache | None
    ) -> Tensor:
        spans, packed = pack(q, k, v, self.sizes, cu_seqlens, None)
        means = compress(packed.k, self.sizes, cu_seqlens=spans.ends_k)
        indices = select_nsa(packed.q, means, None, spans, select_heads=self.q_heads, scale=self.scale)
        out, _ = attend_selected(packed.q, packed.k, packed.v, indices, spans, self.scale, "auto")
        return packed.unpack(out)
