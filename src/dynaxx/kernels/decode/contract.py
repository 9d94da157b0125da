# SPDX-License-Identifier: Apache-2.0
"""A decode step over a cache: what backends are asked, and the functions that they provide.

Shapes use the letters of `dynaxx.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dynaxx.layout.paging import PagedCache, PageSummaries


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

    @property
    def select_and_attend(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """Return `select_pages` and `attend_pages` over what it selects in one call; None: they are two."""

    def summarize_pages(self, cache: PagedCache, summaries: PageSummaries, new_tokens: int | None) -> None:
        """Write the summaries of all pages, or only of those that contain the last `new_tokens` keys."""
