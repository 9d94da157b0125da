"""`AttentionProblem`: what a backend needs to know to say yes or no."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionProblem:
    """The shape and kind of one attention call, without its data."""

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
        return self.q_heads // self.kv_heads

    def __str__(self) -> str:
        cap = "" if self.softcap is None else f", scores capped at {self.softcap:g}"
        grad = ", with gradients" if self.needs_grad else ""
        return (
            f"attention on {self.device} in {str(self.dtype).removeprefix('torch.')}: batch {self.batch}, "
            f"{self.seqlen_q} x {self.seqlen_k} tokens, {self.q_heads}/{self.kv_heads} heads of "
            f"{self.head_dim}/{self.head_dim_v}, blocks of {self.block_size[0]}x{self.block_size[1]}{cap}{grad}"
        )
