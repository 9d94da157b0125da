# SPDX-License-Identifier: Apache-2.0
"""Descriptions of calls, with which backends decide whether they can serve: shapes and dtypes, without data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionProblem:
    """Attention over a layout; or selected attention, whose q blocks are single positions."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    block_size: tuple[int, int]
    needs_grad: bool
    softcap: float | None = None

    @property
    def group_size(self) -> int:
        """Return the number of q heads per kv head."""
        return self.q_heads // self.kv_heads

    def __str__(self) -> str:
        """Return the problem in words, for error messages and `explain`."""
        cap = "" if self.softcap is None else f", scores capped at {self.softcap:g}"
        grad = ", with gradients" if self.needs_grad else ""
        return (
            f"attention on {self.device} in {str(self.dtype).removeprefix('torch.')}: batch {self.batch}, "
            f"{self.seqlen_q} x {self.seqlen_k} tokens, {self.q_heads}/{self.kv_heads} heads of "
            f"{self.head_dim}/{self.head_dim_v}, blocks of {self.block_size[0]}x{self.block_size[1]}{cap}{grad}"
        )


@dataclass(frozen=True)
class DecodeProblem:
    """A decode step over a cache."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    batch: int
    seqlen_q: int
    max_seqlen_k: int
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    paged: bool

    def __str__(self) -> str:
        """Return the problem in words, for error messages and `explain_decode`."""
        name = lambda dtype: str(dtype).removeprefix("torch.")
        kind = "a paged" if self.paged else "a contiguous"
        return (
            f"decoding on {self.device} in {name(self.dtype)} over {kind} {name(self.cache_dtype)} cache: "
            f"batch {self.batch}, {self.seqlen_q} queries, up to {self.max_seqlen_k} keys, "
            f"{self.q_heads}/{self.kv_heads} heads of {self.head_dim}/{self.head_dim_v}, pages of {self.page_size}"
        )


@dataclass(frozen=True)
class SelectionProblem:
    """Scoring of blocks, and optionally the selection of a row's blocks."""

    device: torch.device
    q_blocks: int | None = None  # None: only scores are requested
    kv_blocks: int | None = None
    rule: str = ""
    by_amount: bool = True  # whether the rule is a number, a share or a threshold per row or head

    def __str__(self) -> str:
        """Return the problem in words, for error messages and `explain_selection`."""
        return f"selection on {self.device}: {self.rule} among {self.q_blocks} x {self.kv_blocks} blocks"


@dataclass(frozen=True)
class QueryScoresProblem:
    """Scores of one query per row of q blocks against every key, summed to blocks."""

    device: torch.device
    dtype: torch.dtype  # of k
    head_dim: int
    kv_block: int
    listed: bool  # whether only some blocks of each row are scored
    aligned: bool  # whether rows of k begin at multiples of 16 bytes

    def __str__(self) -> str:
        """Return the problem in words, for error messages."""
        return f"scores of blocks of {self.kv_block} keys on {self.device}: {self.dtype}, head_dim {self.head_dim}"


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
