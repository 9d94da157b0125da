"""`DecodeProblem`: what a backend needs to know of a decoding step to say yes or no."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeProblem:
    """The shape and kind of one step over a cache, without its data."""

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
        name = lambda dtype: str(dtype).removeprefix("torch.")
        kind = "a paged" if self.paged else "a contiguous"
        return (
            f"decoding on {self.device} in {name(self.dtype)} over {kind} {name(self.cache_dtype)} cache: "
            f"batch {self.batch}, {self.seqlen_q} queries, up to {self.max_seqlen_k} keys, "
            f"{self.q_heads}/{self.kv_heads} heads of {self.head_dim}/{self.head_dim_v}, pages of {self.page_size}"
        )
