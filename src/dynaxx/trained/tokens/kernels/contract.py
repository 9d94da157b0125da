# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens, indexers and their loss: what backends are asked, and the functions that they provide.

Shapes use the letters of `dynaxx.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.layout.paging import PagedCache
from dynaxx.trained.tokens.spans import TokenSpans


@dataclass(frozen=True)
class IndexerProblem:
    """The choice of tokens by an indexer."""

    device: torch.device
    dtype: torch.dtype  # in which q and k are multiplied; int8 has a scale per key
    queries: int
    heads: int
    dim: int
    block_size: int
    slots: int

    def __str__(self) -> str:
        """Return the problem in words, for error messages."""
        return (
            f"choice of {self.slots} blocks of {self.block_size} for {self.queries} queries on {self.device} by an "
            f"indexer of {self.heads} heads of {self.dim} in {str(self.dtype).removeprefix('torch.')}"
        )


@dataclass(frozen=True)
class IndexLossProblem:
    """The divergence between dense attention and an indexer."""

    device: torch.device
    dtype: torch.dtype  # of attention's q and k
    head_dim: int
    index_dtype: torch.dtype  # of the indexer's q and k
    index_heads: int
    index_dim: int

    def __str__(self) -> str:
        """Return the problem in words, for error messages."""
        name = lambda dtype: str(dtype).removeprefix("torch.")
        return (
            f"the loss on {self.device} of an indexer of {self.index_heads} heads of {self.index_dim} in "
            f"{name(self.index_dtype)} beside attention of head_dim {self.head_dim} in {name(self.dtype)}"
        )


class TokenKernels(Protocol):
    """Attention of packed sequences over tokens that each query chooses. `plan` is what `prepare` returned."""

    def prepare(self, block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Return what forward and backward share; `block_indices` is (T, Hs, n) int32, ascending, -1 behind."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Any,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out (T, Hq, E) and lse (Hq, T) fp32."""

    def backward(
        self, do: Tensor, dlse: Tensor, saved: SavedForward, plan: Any, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv."""

    @property
    def latent_backward(self) -> Callable[..., Any] | None:
        """`backward` for a v that is the first columns of k: dq, and dk that contains dv; None: add them in torch."""


class TokenDecodeKernels(Protocol):
    """A decoding step over chosen tokens of a cache."""

    def attend_tokens(
        self,
        q: Tensor,
        cache: PagedCache,
        block_indices: Tensor,
        block_size: int,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, N, Hq, E) and lse (B, Hq, N); `block_indices` is (B, N, Hs, n) int32."""


class IndexerKernels(Protocol):
    """The choice of tokens by an indexer, of packed sequences."""

    def index_tokens(
        self, q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, spans: TokenSpans, slots: int
    ) -> Tensor:
        """Return the best blocks of each query, (T, 1, slots) int32, ascending, -1 behind."""

    def to_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return e4m3 numbers and the scale of each row in fp32, bitwise as `kernels.rounding.to_fp8`."""

    def to_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return whole numbers, in fp32 or bf16, and the scale of each row in fp32, as `kernels.rounding.to_int8`."""


class IndexLossCall(NamedTuple):
    """A call of an indexer's loss, of packed sequences."""

    index_q: Tensor  # (T, Hi, Di)
    index_k: Tensor  # (M, Di)
    weights: Tensor  # (T, Hi)
    q: Tensor  # (T, Hq, D), of attention
    k: Tensor  # (M, Hk, D), of attention
    block_indices: Tensor | None  # (T, n): target and softmax are renormalised to these blocks; None: all visible keys
    spans: TokenSpans
    scale: float  # of attention
    index_scale: float  # of the indexer's scores
    needs_grad: bool  # whether to compute gradients of index_q, index_k and weights


class IndexLossKernels(Protocol):
    """The divergence between dense attention and an indexer."""

    def index_loss(self, call: IndexLossCall) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the sums over queries of divergence and of attention on `block_indices` (T, n), and the gradients.

        Gradients are those of the sum of divergence in index_q, index_k and weights, in fp32 at least, if asked for.
        """
