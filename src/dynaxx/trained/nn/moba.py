# SPDX-License-Identifier: Apache-2.0
"""`MixtureOfBlockAttention`: each q head attends to its own block and to the blocks with the best mean keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import BLOCK_SIZES, CuSeqlens
from dynaxx.trained.nn.cache import LayerCache
from dynaxx.trained.nn.projection import ProjectedAttention
from dynaxx.trained.nsa.attention import compress, select_nsa
from dynaxx.trained.nsa.spans import NsaSizes
from dynaxx.trained.packing import pack
from dynaxx.trained.selected import attend_selected


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
