# SPDX-License-Identifier: Apache-2.0
"""The functions that a backend provides for each operation. `kernels.registry` lists the backends of each operation.

A backend is a module or package whose functions have these names, parameters and results. The functions are pure: they
do not check arguments, keep state or use autograd. `kernels.reference` defines every result; the other backends are
tested against it.

Legend: B batch; N queries, M keys; T queries of all packed sequences; Hq, Hk, Hs query, kv and selection heads;
D head_dim of q and k, E head_dim of v; n slots; L compressed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dynaxx.layout import BlockGrid, BlockLayout
from dynaxx.layout.nsa import NsaSizes, NsaSpans
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.layout.paging.compressed import CompressedPages, NsaLengths
from dynaxx.layout.tokens import TokenSpans


class AttentionKernels(Protocol):
    """Attention over a layout."""

    def attention_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: BlockLayout,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, N, Hq, E) in q's dtype and lse (B, Hq, N) fp32, natural log; sinks are (Hq,).

        A given `out`, of any strides, receives the result.
        """

    def attention_backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: BlockLayout,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv. `dlse` is None if lse has no gradient. With sinks, out and lse must include them."""


class DecodeKernels(Protocol):
    """A decode step over a cache."""

    def attend_pages(
        self,
        q: Tensor,
        cache: PagedCache,
        block_indices: Tensor | None,
        counts: Tensor | None,
        scale: float,
        softcap: float | None = None,
        left: int | None = None,
        sink_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, N, Hq, E) and lse (B, Hq, N) over the listed pages, or over all pages without a list."""

    def select_pages(
        self, q: Tensor, cache: PagedCache, wanted: Tensor, sinks: int, window: int, slots: int, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the selected pages (B, Hk, slots) int32, and their counts if the backend computes them."""

    def select_and_attend(
        self,
        q: Tensor,
        cache: PagedCache,
        wanted: Tensor,
        sinks: int,
        window: int,
        slots: int,
        scale: float,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse over the pages that `select_pages` selects."""

    def summarize_pages(self, cache: PagedCache, summaries: PageSummaries, new_tokens: int | None) -> None:
        """Write the summaries of all pages, or only of those that contain the last `new_tokens` keys."""


class NsaKernels(Protocol):
    """Native sparse attention of packed sequences. `plan` is the result of this backend's `prepare_selected`."""

    def schedule_of(self, group_size: int, kv_block: int) -> str:
        """Describe in words in which order the backend processes selected blocks."""

    def prepare_selected(self, block_indices: Tensor, spans: NsaSpans, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Return a plan that forward and backward share; `block_indices` is (T, Hs, n) int32."""

    def selected_forward(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Return out (T, Hq, E) and lse (Hq, T) fp32."""

    def selected_backward(
        self,
        do: Tensor,
        dlse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        plan: Any,
        scale: float,
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
        self,
        do: Tensor,
        dlse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        plan: Any,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv. With sinks, out and lse are those with them."""

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


class IndexLossKernels(Protocol):
    """The divergence between dense attention and an indexer, of packed sequences."""

    def index_loss(
        self,
        index_q: Tensor,
        index_k: Tensor,
        weights: Tensor,
        q: Tensor,
        k: Tensor,
        block_indices: Tensor | None,
        spans: TokenSpans,
        scale: float,
        index_scale: float,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the sums over queries of divergence and of attention on `block_indices` (T, n), and the gradients.

        Gradients are those of the sum of divergence in index_q, index_k and weights, in fp32 at least, if asked for.
        """


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
        self,
        rows: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cmp: Tensor,
        v_cmp: Tensor,
        plan: Any,
        layouts: tuple[BlockLayout, BlockLayout],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return dq, dk, dv, dk_cmp, dv_cmp."""


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


class Candidates(NamedTuple):
    """The kv blocks that a second scoring stage considers: a list per kv head and panel of neighbouring q blocks."""

    blocks: Tensor  # (B, Hk, panels, slots) int32; -1 = empty slot, after all other slots
    panel: int  # q blocks per panel


class QueryScoresKernels(Protocol):
    """Scores of blocks, (B, Hq, rows, kv blocks) fp32, by one query per row."""

    def query_scores(
        self,
        queries: Tensor,
        k: Tensor,
        first_row: int,
        grid: BlockGrid,
        candidates: Candidates | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return the log of the attention mass that one query per row gives to each block.

        With `places`, (kv blocks,) int32, block i of the keys is block places[i] of k.
        """


class SelectionKernels(Protocol):
    """Scores of blocks, from which selectors choose. Scores are (B, Hq, rows, kv blocks) fp32."""

    def pool_blocks(self, x: Tensor, size: int, kind: str, scale: float = 1.0, dtype: Any = ...) -> Tensor:
        """Return the mean, minimum or maximum of each block of `size` tokens."""

    def quantised_keys(self, k: Tensor, center: Tensor, kv_block: int) -> Any:
        """Return keys in 8 bits, for `int8_scores`."""

    def int8_scores(
        self, queries: Tensor, keys: Any, first_row: int, grid: BlockGrid, candidates: Candidates | None = None
    ) -> Tensor:
        """Return `query_scores`, computed with 8-bit products."""

    def probe_lines(self, probes: Tensor, k: Tensor, grid: BlockGrid, scale: float) -> tuple[Tensor, Tensor]:
        """Return the mean attention of the last queries along columns and along diagonals."""

    def line_scores(self, vertical: Tensor, diagonal: Tensor, start: int, stop: int, grid: BlockGrid) -> Tensor:
        """Return scores of blocks, computed from the columns and diagonals that cross them."""

    def tile_mass(
        self, queries: Tensor, keys: Tensor, first_tile: int, mass: Tensor, grid: BlockGrid, sizes: tuple[int, int],
        *, panel: int = 1, parts: int = 1, scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Write to `mass` the attention mass between pooled queries and pooled keys."""

    def hash_counts(self, x: Tensor, size: int, planes: Tensor, center: Tensor, tables: int, bits: int) -> Tensor:
        """Return how many tokens of each block fall into each hash bucket."""
