# SPDX-License-Identifier: Apache-2.0
"""Checks and packing of the inputs of native sparse attention: sequences are laid out one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.derivatives import refuse_transforms
from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.layout.packed import CuSeqlens
from dynaxx.ops.checks import DTYPES
from dynaxx.trained.nsa.spans import NsaSizes, NsaSpans, nsa_spans
from dynaxx.trained.tokens.spans import sequence_ends


@dataclass(frozen=True)
class Packed:
    """q, k, v without a batch dimension."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: tuple[int, int] | None  # (batch, seqlen_q) of the caller's q; None if it was packed already

    def unpack(self, out: Tensor) -> Tensor:
        """Reshape (tokens, ...) to the batch of the caller's q."""
        return out if self.batch is None else out.view(*self.batch, *out.shape[1:])


def pack(
    q: Tensor, k: Tensor, v: Tensor, sizes: NsaSizes, ends_q: CuSeqlens | None, ends_k: CuSeqlens | None
) -> tuple[NsaSpans, Packed]:
    """Check that q, k and v match each other, and pack their sequences.

    Raises:
        ValueError, TypeError: a shape, dtype or device is wrong, or lengths do not match.
    """
    refuse_transforms("native sparse or selected attention", q, k, v)
    _check_tensors(q, k, v)
    batched = q.ndim == 4
    ends = sequence_ends(q, k, ends_q, ends_k, batched=batched)
    packed = Packed(q, k, v, None)
    if batched:
        packed = Packed(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), (q.shape[0], q.shape[1]))
    return nsa_spans(sizes, *ends, device=q.device), packed


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that shapes, dtypes and devices of q, k and v match each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim not in (3, 4) or x.ndim != q.ndim:
            raise ValueError(
                f"`{name}` must be (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) with `cu_seqlens_q`, "
                f"like q, got {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise TypeError(f"`{name}` must have q's dtype, one of {DTYPES}, got {x.dtype} and q {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"`{name}` must be on q's device {q.device}, got {x.device}")
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1] or k.shape[:-3] != q.shape[:-3]:
        raise ValueError(
            "`q`, `k` and `v` must agree in batch, k and v in seqlen and heads, q and k in head_dim, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not (q.shape[-2] and k.shape[-2]) or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q_heads must be a multiple of kv_heads, both >= 1, got {q.shape[-2]} and {k.shape[-2]}")
    if not (q.shape[-1] and v.shape[-1]):
        raise ValueError(f"head_dim must be >= 1, got {q.shape[-1]} and {v.shape[-1]}")


def packed_problem(q: Tensor, k: Tensor, v: Tensor, block_size: int, softcap: float | None = None) -> AttentionProblem:
    """Describe packed q, k and v for backends. Queries choose their blocks one by one, so the q block is 1."""
    return AttentionProblem(
        device=q.device,
        dtype=q.dtype,
        batch=1,
        seqlen_q=q.shape[0],
        seqlen_k=k.shape[0],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        block_size=(1, block_size),
        needs_grad=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
        softcap=softcap,
    )
