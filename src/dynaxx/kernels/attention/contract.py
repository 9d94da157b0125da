# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout: what backends are asked, and the functions that they provide.

Shapes use the letters of `dynaxx.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout


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
    biased: bool = False  # whether a bias by distance is added to the scores
    bias_grad: bool = False  # whether the bias needs a gradient

    @property
    def group_size(self) -> int:
        """Return the number of q heads per kv head."""
        return self.q_heads // self.kv_heads

    def __str__(self) -> str:
        """Return the problem in words, for error messages and `explain`."""
        cap = "" if self.softcap is None else f", scores capped at {self.softcap:g}"
        cap += f", a position bias{' with gradients' if self.bias_grad else ''}" if self.biased else ""
        grad = ", with gradients" if self.needs_grad else ""
        return (
            f"attention on {self.device} in {str(self.dtype).removeprefix('torch.')}: batch {self.batch}, "
            f"{self.seqlen_q} x {self.seqlen_k} tokens, {self.q_heads}/{self.kv_heads} heads of "
            f"{self.head_dim}/{self.head_dim_v}, blocks of {self.block_size[0]}x{self.block_size[1]}{cap}{grad}"
        )


class SavedForward(NamedTuple):
    """Inputs and results of a forward, which its backward reads. With sinks, out and lse include them."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class AttentionKernels(Protocol):
    """Attention over a layout.

    A backend that does not refuse biased problems also takes `bias`, a table or slopes as in `kernels.bias`, in lse's
    dtype, as its last parameter, and in the backward a `dbias` of that shape, to which it adds the gradient.
    """

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
