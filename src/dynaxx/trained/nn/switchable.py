# SPDX-License-Identifier: Apache-2.0
"""`SwitchableAttention`: dense for short sequences and sparse for long ones, with the same parameters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import CuSeqlens
from dynaxx.trained.nn.cache import LayerCache
from dynaxx.trained.nn.projection import ProjectedAttention
from dynaxx.trained.nsa.attention import compress, select_nsa
from dynaxx.trained.nsa.branches import compressed_attention
from dynaxx.trained.nsa.spans import NsaSizes
from dynaxx.trained.packing import pack
from dynaxx.trained.selected import attend_selected

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
