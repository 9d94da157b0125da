# SPDX-License-Identifier: Apache-2.0
"""`SwitchableAttention`: dense where that is affordable, sparse by its own keys where not, with the same parameters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout import CuSeqlens
from dynaxx.layout.nsa import NativeSizes
from dynaxx.nn.cache import NativeCache
from dynaxx.nn.projection import ProjectedAttention
from dynaxx.ops.nsa import compress, select_native
from dynaxx.ops.nsa_branches import compressed_attention
from dynaxx.ops.packing import pack
from dynaxx.ops.selected import attend_selected

SWITCHABLE_SIZES = NativeSizes(slc_count=96, first_blocks=1, local_blocks=32)  # a sink, a window of 2048, 63 more


@typed
class SwitchableAttention(ProjectedAttention):
    """InfLLM-V2 (arXiv 2509.24663): each query attends to the first blocks, the last ones, and those it likes best.

    A block is as good as the best of the mean keys that overlap it. Without parameters beside the projections, so a
    dense model can take it as it is.

    Up to slc_count * slc_block tokens every block is selected: then it runs as dense attention, with the same result.

    Args:
        hidden_size, q_heads, kv_heads, **projection: as `ProjectedAttention`.
        sizes: `cmp_block`, `cmp_stride` of the mean keys, `slc_block`, and `slc_count` blocks per query, `first_blocks`
            and `local_blocks` of which are forced. `window` has no meaning here, `pool` is "max".
    """

    def __init__(
        self, hidden_size: int, q_heads: int, kv_heads: int, *, sizes: NativeSizes | None = None, **projection: Any
    ) -> None:
        super().__init__(hidden_size, q_heads, kv_heads, **projection)
        self.sizes = replace(sizes or SWITCHABLE_SIZES, pool="max")

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: NativeCache | None
    ) -> Tensor:
        spans, packed = pack(q, k, v, self.sizes, cu_seqlens, None)
        if max(b - a for a, b in pairwise(spans.ends_k)) <= self.sizes.slc_count * self.sizes.slc_block:
            return self.attend_dense(q, k, v, cu_seqlens)
        with torch.no_grad():
            k_cmp = compress(packed.k, self.sizes, cu_seqlens=spans.ends_k)
            _, lse = compressed_attention(packed, k_cmp, k_cmp, spans, self.scale, "auto")
            indices = select_native(packed.q, k_cmp, lse, spans, scale=self.scale)
        out, _ = attend_selected(packed.q, packed.k, packed.v, indices, spans, self.scale, "auto")
        return packed.unpack(out)
