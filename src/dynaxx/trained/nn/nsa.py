# SPDX-License-Identifier: Apache-2.0
"""`NativeSparseAttention`: compressed, selected and window attention, mixed by learned gates."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import CuSeqlens
from dynaxx.trained.nn.cache import LayerCache
from dynaxx.trained.nn.compression import COMPRESSIONS, Compression, MlpCompression
from dynaxx.trained.nn.projection import ProjectedAttention
from dynaxx.trained.nsa.attention import compress, compression_windows, native_sparse_attention
from dynaxx.trained.nsa.decode import nsa_decode
from dynaxx.trained.nsa.spans import NsaSizes

EVEN_GATES = (0.5, 0.5, 0.5)  # for training from scratch
DECODE_TOKENS = 8  # largest step that reads pages; longer steps run as a prompt
NEAR_DENSE = (0.02, 0.96, 0.02)  # the selected branch alone is dense attention up to slc_count * slc_block tokens


@typed
class NativeSparseAttention(ProjectedAttention):
    """Native Sparse Attention (arXiv 2502.11089) with any group size. Training and inference use the same sparsity.

    Args:
        hidden_size: see `ProjectedAttention`.
        q_heads: see `ProjectedAttention`.
        kv_heads: see `ProjectedAttention`.
        sizes: sizes of the branches. They may be replaced at any time by sizes with the same `cmp_block`; a larger
            `slc_count` is closer to dense attention.
        compression: how a window of keys, or of values, is compressed to one: "mean", "weighted" or "mlp".
        gate_init: initial values of the gates, each in (0, 1), in the order compressed, selected, window.
        **projection: other arguments of `ProjectedAttention`.
    """

    decodes_ragged = True

    def __init__(
        self,
        hidden_size: int,
        q_heads: int,
        kv_heads: int,
        *,
        sizes: NsaSizes | None = None,
        compression: Literal["mean", "weighted", "mlp"] = "mlp",
        gate_init: tuple[float, float, float] = EVEN_GATES,
        **projection: Any,
    ) -> None:
        super().__init__(hidden_size, q_heads, kv_heads, **projection)
        if compression not in COMPRESSIONS:
            raise ValueError(f"`compression` must be one of {tuple(COMPRESSIONS)}, got {compression!r}")
        if len(gate_init) != 3 or not all(0 < gate < 1 for gate in gate_init):
            raise ValueError(f"`gate_init` must be three numbers between 0 and 1, got {gate_init}")
        self.sizes = NsaSizes() if sizes is None else sizes
        make = COMPRESSIONS[compression]
        self.compress_k = make(self.sizes.cmp_block, kv_heads, self.head_dim)
        self.compress_v = make(self.sizes.cmp_block, kv_heads, self.head_dim_v)
        self.gate_init = gate_init
        self.gate = nn.Linear(hidden_size, 3 * q_heads)
        self.reset_new_parameters()

    def reset_new_parameters(self) -> None:
        """Reset the parameters that dense attention lacks: gates to `gate_init`, compression to the mean."""
        nn.init.zeros_(self.gate.weight)
        with torch.no_grad():
            logits = self.gate.bias.new_tensor([math.log(gate / (1 - gate)) for gate in self.gate_init])
            self.gate.bias.copy_(logits.repeat(self.q_heads))
        self.compress_k.reset_parameters()
        self.compress_v.reset_parameters()

    @override
    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: LayerCache | None
    ) -> Tensor:
        gates = self.gate(x).sigmoid().unflatten(-1, (self.q_heads, 3))
        if cache is not None and cu_seqlens is None and (q.shape[1] <= DECODE_TOKENS or not cache.even):
            return self._decode(q, gates, cache)
        return native_sparse_attention(
            q,
            k,
            v,
            self._compressed(k, v, cu_seqlens, cache),
            gates,
            self.sizes,
            cu_seqlens_q=cu_seqlens,
            scale=self.scale,
        )

    def _decode(self, q: Tensor, gates: Tensor, cache: LayerCache) -> Tensor:
        blocks = cache.blocks() if q.shape[1] == 1 else None
        pages = cache.pages(self.sizes, self.compress_k.pooling, self.compress_v.pooling)
        out, blocks = nsa_decode(q, pages, gates, block_indices=blocks, scale=self.scale)
        cache.keep_blocks(blocks)
        return out

    def _compressed(
        self, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        if cache is not None and cu_seqlens is None:
            return cache.compressed_views(self.sizes, self.compress_k.pooling, self.compress_v.pooling)
        return self._compress(k, self.compress_k, cu_seqlens), self._compress(v, self.compress_v, cu_seqlens)

    def _compress(self, x: Tensor, how: Compression, cu_seqlens: CuSeqlens | None) -> Tensor:
        if not isinstance(how, MlpCompression):
            return compress(x, self.sizes, how.weight, cu_seqlens=cu_seqlens)
        windows = compression_windows(x, self.sizes, cu_seqlens=cu_seqlens)
        return how(windows) if cu_seqlens is not None else how(windows.flatten(0, 1)).unflatten(0, windows.shape[:2])
