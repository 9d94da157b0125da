# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention: what backends are asked, and the functions that they provide.

Shapes use the letters of `dynaxx.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.layout import BlockLayout
from dynaxx.layout.paging import PagedCache
from dynaxx.trained.nsa.compressed_pages import CompressedPages, NsaLengths
from dynaxx.trained.nsa.spans import NsaSizes, NsaSpans


class NsaKernels(Protocol):
    """Native sparse attention of packed sequences. `plan` is the result of this backend's `prepare_selected`."""

    def schedule_of(self, group_size: int, kv_block: int) -> str:
        """Describe in words in which order the backend processes selected blocks."""

    def prepare_selected(self, block_indices: Tensor, spans: NsaSpans, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Return a plan that forward and backward share; `block_indices` is (T, Hs, n) int32."""

    def selected_forward(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Return out (T, Hq, E) and lse (Hq, T) fp32."""

    def selected_backward(
        self, do: Tensor, dlse: Tensor, saved: SavedForward, plan: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv."""

    def select_blocks(
        self, q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NsaSpans, heads: int, scale: float
    ) -> Tensor:
        """Return the selected blocks (T, Hs, n) int32, ascending, padded with -1."""

    @property
    def pooling(self) -> Pooling | None:
        """Kernels that pool windows of tokens; None: use torch."""

    @property
    def gating(self) -> Gating | None:
        """Kernels for the gated sum; None: use torch."""

    @property
    def fused(self) -> FusedBranches | None:
        """Kernels that compute all branches together; None: each branch runs separately."""


class Pooling(Protocol):
    """Pooling of windows of tokens to compressed tokens, for sequences of equal length."""

    def pool_forward(self, x: Tensor, weight: Tensor | None, spans: NsaSpans) -> Tensor:
        """Return (L, H, D): the mean of each window, or its sum weighted by `weight` (cmp_block, H)."""

    def pool_backward(
        self, do: Tensor, x: Tensor, weight: Tensor | None, spans: NsaSpans
    ) -> tuple[Tensor, Tensor | None]:
        """Return dx and dweight."""


class Gating(Protocol):
    """The sum of three branches, weighted by gates."""

    def gated_sum_forward(self, outs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
        """Return the sum (T, Hq, E); gates are (T, Hq, 3)."""

    def gated_sum_backward(
        self, do: Tensor, outs: tuple[Tensor, Tensor, Tensor], gates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of the three branches and of the gates."""


class FusedBranches(Protocol):
    """The three branches of native sparse attention in fused kernels. Each backend defines its own argument types."""

    @property
    def Mixture(self) -> Callable[..., Any]:
        """Constructor of the `mixture` argument: the other branches, to which `selected_and_mixed` adds its own."""

    @property
    def Branches(self) -> Callable[..., Any]:
        """Constructor of the `branches` argument: the forward results of the branches."""

    def selected_and_mixed(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float, mixture: Any
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of the selected branch, and write the gated sum to `mixture.out`."""

    def branch_rows(
        self, do: Tensor, branches: Any, gates: Tensor, plan: Any, layout: BlockLayout
    ) -> tuple[Any, Tensor]:
        """Return the rows that `mixed_backward` reads for each query, and the gradient of the gates."""

    def mixed_backward(
        self, rows: Any, inputs: Sequence[Tensor], plan: Any, layouts: tuple[BlockLayout, BlockLayout], scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of the inputs q, k, v, k_cmp and v_cmp."""


class NsaDecodeKernels(Protocol):
    """The functions that a decode step of native sparse attention needs in addition to `DecodeKernels`."""

    def record_or_replay(self, call: Callable[..., Any], inputs: PagedCache, tensors: Any, *settings: Any) -> Any:
        """Return `call(inputs, *tensors, *settings)`. GPU backends record the launches of a call and replay them."""

    def step_lengths(self, seqused: Tensor, sizes: NsaSizes) -> NsaLengths:
        """Return the lengths that each branch reads."""

    def select_blocks(
        self,
        q: Tensor,
        cache: PagedCache,
        lse: Tensor,
        lengths: NsaLengths,
        sizes: NsaSizes,
        max_blocks: int,
        scale: float,
    ) -> Tensor:
        """Return the selected blocks (B, Hk, n) int32."""

    def kept_blocks(self, blocks: Tensor, lengths: NsaLengths, sizes: NsaSizes) -> Tensor:
        """Return an earlier selection with the forced blocks of the current position."""

    def pages_of(self, blocks: Tensor, pages_per_block: int, max_pages: int) -> Tensor:
        """Return the pages of the given blocks."""

    def gated_sum(self, outs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
        """Return the sum of the branches, weighted by the gates."""

    def gather_windows(self, cache: PagedCache, sizes: NsaSizes, count: int, skip: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of the last windows of each sequence, for k and for v."""

    def compress_windows(
        self, cache: PagedCache, weights: tuple[Tensor | None, Tensor | None], count: int, skip: int
    ) -> None:
        """Pool the last windows of each sequence and store them."""

    def store_compressed(
        self, cache: PagedCache, compressed: CompressedPages, k_cmp: Tensor, v_cmp: Tensor, count: int, skip: int
    ) -> None:
        """Store compressed tokens that the caller has pooled."""
