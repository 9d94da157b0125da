# SPDX-License-Identifier: Apache-2.0
"""The base class of the attention modules: projections, rotary positions, dense attention for a warm-up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout import CuSeqlens
from dynaxx.layout.host import never_traced
from dynaxx.ops.attention import sparse_attention
from dynaxx.ops.library import number_of, pattern_attention
from dynaxx.patterns.base import Causal, Pattern
from dynaxx.patterns.packed import packed_layout
from dynaxx.trained.nn.cache import LayerCache

Rotary = tuple[Tensor, Tensor]


@typed
def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions to each head. The halves of head_dim are the two coordinates, as in Llama.

    Args:
        x: (..., seqlen, heads, head_dim).
        rotary: (cos, sin), each (..., seqlen, head_dim), as returned by transformers' rotary embeddings.
    """
    if x.ndim < 3 or any(part.shape[-2:] != (x.shape[-3], x.shape[-1]) for part in rotary):
        raise ValueError(
            "`rotary` must be (cos, sin), each (..., seqlen, head_dim), and `x` (..., seqlen, heads, head_dim), "
            f"got {[tuple(part.shape) for part in rotary]} and {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"`x` must have a floating-point dtype, got {x.dtype}")
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotate_first_columns(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions to the first columns of each head, as many as `rotary` has, and keep the other columns.

    The halves of these columns are the two coordinates. Each half of `rotary` has all frequencies, the fastest first;
    if x has fewer columns, they turn by the fastest.

    Args:
        x: (..., seqlen, heads, dim).
        rotary: (cos, sin), each (..., seqlen, columns).
    """
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in rotary)
    width = min(cos.shape[-1], x.shape[-1]) // 2 * 2
    half = width // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second, rest = x[..., :half], x[..., half:width], x[..., width:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@typed
class ProjectedAttention(nn.Module, ABC):
    """Causal self-attention: project hidden states to q, k and v, attend, and project back.

    Args:
        hidden_size: size of the inputs and outputs.
        q_heads: number of query heads, a multiple of kv_heads.
        kv_heads: number of key and value heads.
        head_dim: size of the heads of q and k, hidden_size // q_heads by default.
        head_dim_v: size of the heads of v, head_dim by default.
        bias: whether the projections to q, k and v have a bias.
        scale: softmax scale, head_dim ** -0.5 by default.

    Raises:
        ValueError: a size is below 1, q_heads is not a multiple of kv_heads, or the scale is not finite.
    """

    def __init__(
        self,
        hidden_size: int,
        q_heads: int,
        kv_heads: int,
        *,
        head_dim: int | None = None,
        head_dim_v: int | None = None,
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if q_heads < 1 or kv_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"`q_heads` must be a multiple of `kv_heads`, got {q_heads} and {kv_heads}")
        self.hidden_size, self.q_heads, self.kv_heads = hidden_size, q_heads, kv_heads
        self.head_dim = hidden_size // q_heads if head_dim is None else head_dim
        self.head_dim_v = self.head_dim if head_dim_v is None else head_dim_v
        if hidden_size < 1 or self.head_dim < 1 or self.head_dim_v < 1:
            raise ValueError(
                f"`hidden_size`, `head_dim` and `head_dim_v` must be >= 1, got {hidden_size}, {self.head_dim} and "
                f"{self.head_dim_v}"
            )
        self.scale = softmax_scale(scale, self.head_dim)
        self.q_proj = nn.Linear(hidden_size, q_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * self.head_dim_v, bias=bias)
        self.o_proj = nn.Linear(q_heads * self.head_dim_v, hidden_size, bias=False)
        self.dense = False  # True runs dense attention, for a warm-up

    @typed
    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        *,
        cu_seqlens: CuSeqlens | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: (batch, seqlen, hidden_size), or packed (tokens, hidden_size) with `cu_seqlens`.
            rotary: (cos, sin) of the positions of x, each (..., seqlen, head_dim); none by default.
            cu_seqlens: (num_seqs + 1,) cumulative lengths of packed sequences. Keep them on the host; lengths on a GPU
                are read back.
            cache: keys and values of the tokens before x; those of x are appended. Packed input must come first, and
                its sequences may have different lengths. For inference only.

        Returns:
            A tensor of the shape of x.
        """
        q, k, v = self.projected(x, rotary, cu_seqlens)
        attend = _attend if self.is_traceable(cu_seqlens, cache) else attend_outside_of_graphs
        out = attend(self, x, q, k, v, cu_seqlens, cache)
        return self.o_proj(out.flatten(-2))

    def projected(
        self, x: Tensor, rotary: Rotary | None, cu_seqlens: CuSeqlens | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Check x and return q, k and v, rotated.

        Raises:
            ValueError, TypeError: x has a wrong shape or is not a floating-point tensor.
        """
        if x.ndim not in (2, 3) or x.shape[-1] != self.hidden_size or (x.ndim == 2) != (cu_seqlens is not None):
            raise ValueError(
                f"`x` must be (batch, seqlen, hidden_size = {self.hidden_size}), or packed (tokens, hidden_size) with "
                f"`cu_seqlens`, got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"`x` must have a floating-point dtype, got {x.dtype}")
        q = self.q_proj(x).unflatten(-1, (self.q_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim_v))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        return q, k, v

    decodes_ragged = False  # whether `attend` accepts a cache whose sequences have different lengths

    @abstractmethod
    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None, cache: LayerCache | None
    ) -> Tensor:
        """Return (..., q_heads, head_dim_v) from projected and rotated q, k, v.

        If the sequences of the cache have equal lengths, k and v include its tokens.
        """

    def is_traceable(self, cu_seqlens: CuSeqlens | None, cache: LayerCache | None) -> bool:
        """Return whether `torch.compile` can trace `attend` for these arguments; else the graph breaks there."""
        return False

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens | None) -> Tensor:
        """Attend to every key at or before the query."""
        if cu_seqlens is not None:
            packed = packed_layout(Causal(), cu_seqlens, block_size=64, device=q.device)
            return sparse_attention(q, k, v, packed, scale=self.scale)
        if q.shape[1] != k.shape[1]:
            return attend_pattern(q, k, v, CAUSAL, CAUSAL_NUMBER, 64, self.scale)
        grouped = self.q_heads != self.kv_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped).transpose(1, 2)

    @override
    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, heads={self.q_heads}/{self.kv_heads}, head_dim={self.head_dim}"


def _attend(
    module: ProjectedAttention,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: CuSeqlens | None,
    cache: LayerCache | None,
) -> Tensor:
    if cache is not None:
        if cu_seqlens is None and (module.dense or not module.decodes_ragged):
            cache.check_even()  # before anything is appended
        cache.append(k, v, cu_seqlens)
        if cu_seqlens is None and (cache.even or not module.decodes_ragged or module.dense):
            k, v = cache.views()
    if module.dense:
        return module.attend_dense(q, k, v, cu_seqlens)
    return module.attend(x, q, k, v, cu_seqlens, cache)


@never_traced
def attend_outside_of_graphs(module: ProjectedAttention, *args: Any) -> Tensor:
    """Call `_attend`, which chooses blocks and builds layouts on the host, between the graphs of a compiler."""
    return _attend(module, *args)


def attend_pattern(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, number: int, block_size: int, scale: float
) -> Tensor:
    """Attend over a pattern. `torch.compile` sees one op for all lengths; an export fixes the layout.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim).
        pattern: the keys that each query sees.
        number: its `number_of`, which torch 2.11 cannot compute while it compiles.
        block_size: tokens per block of the layout.
        scale: softmax scale.
    """
    if torch.compiler.is_dynamo_compiling():
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return pattern_attention(q, k, v, number, block_size, scale, needs_grad)
    with _disable_current_modes():  # the layout must have real tensors while torch traces with fake ones
        layout = pattern.layout(int(q.shape[1]), int(k.shape[1]), block_size=block_size, device=q.device)
    return sparse_attention(q, k, v, layout, scale=scale)


CAUSAL = Causal()
CAUSAL_NUMBER = number_of(CAUSAL)
