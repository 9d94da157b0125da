# SPDX-License-Identifier: Apache-2.0
"""`SparseAttention`: self-attention over a static pattern."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import CuSeqlens
from dynaxx.ops.attention import sparse_attention
from dynaxx.ops.library import number_of
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.packed import packed_layout
from dynaxx.trained.nn.cache import LayerCache
from dynaxx.trained.nn.projection import ProjectedAttention, attend_pattern


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
