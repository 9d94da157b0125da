# SPDX-License-Identifier: Apache-2.0
"""`TopKTokens`: each query keeps the single keys, or small groups of keys, with most of its attention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import refuse_transforms
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.grid import BLOCK_SIZES
from dynaxx.layout.host import never_traced, without_autocast
from dynaxx.layout.packed import CuSeqlens
from dynaxx.settings import Range, check_settings
from dynaxx.trained.tokens.spans import TOKEN_BLOCKS, TokenSpans, best_of, sequence_ends

SCORE_BYTES = 64 << 20  # bytes of scores held at once
MAX_TOKENS = 1 << 20  # limit on the tokens that a query keeps


@typed
@dataclass(frozen=True)
class TopKTokens:
    """Keep the `k` keys of each query with most of its attention; of equal keys, the earlier ones.

    The q heads of a kv head choose together, by the sum of their attention. This is the exact top-k of dense attention,
    which costs as much as dense attention. Cheaper choices, such as an indexer's, are compared with it.

    Args:
        k: tokens kept per query; a multiple of `block_size`.
        block_size: neighbouring tokens that are kept together: 1, 2, 4, 8, 16, 32, 64 or 128.
    """

    k: Annotated[int, Range(1, MAX_TOKENS)]
    block_size: int = 1

    def __post_init__(self) -> None:
        """Check the block size and the number of tokens."""
        check_settings(self, TopKTokens)
        if self.block_size not in (*TOKEN_BLOCKS, *BLOCK_SIZES):
            raise ValueError(f"`block_size` must be one of {(*TOKEN_BLOCKS, *BLOCK_SIZES)}, got {self.block_size}")
        if self.k % self.block_size:
            raise ValueError(f"`k` must be a multiple of `block_size` {self.block_size}, got {self.k}")

    @property
    def slots(self) -> int:
        """Return the number of blocks that a query keeps."""
        return self.k // self.block_size

    @never_traced
    @typed
    @without_autocast
    @torch.no_grad()
    def select(
        self,
        q: Tensor,
        k: Tensor,
        *,
        cu_seqlens_q: CuSeqlens | None = None,
        cu_seqlens_k: CuSeqlens | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Choose keys for `selected_attention(q, k, v, chosen, block_size=self.block_size)`.

        Scores are computed for a few queries at a time, so memory is linear in the number of keys.

        Args:
            q: (batch, seqlen_q, q_heads, head_dim), aligned to the last keys; packed (tokens, q_heads, head_dim).
            k: (batch, seqlen_k, kv_heads, head_dim), packed as q.
            cu_seqlens_q: packed inputs only: (num_seqs + 1,) cumulative lengths from 0.
            cu_seqlens_k: packed inputs only: cumulative lengths of the keys; defaults to `cu_seqlens_q`.
            scale: softmax scale, default head_dim ** -0.5.

        Returns:
            block_indices (batch, seqlen_q, kv_heads, k / block_size) int32, packed without batch: ascending,
            with -1 at the end.

        Raises:
            ValueError: inputs that do not fit together.
        """
        check_queries_and_keys(q, k)
        refuse_transforms("`TopKTokens.select`", q, k, fix="choose outside of the transformed function")
        scale = softmax_scale(scale, q.shape[-1])
        batched = q.ndim == 4
        ends_q, ends_k = sequence_ends(q, k, cu_seqlens_q, cu_seqlens_k, batched=batched)
        flat_q, flat_k = (x.flatten(0, 1) if batched else x for x in (q, k))
        spans = zip(pairwise(ends_q), pairwise(ends_k), strict=True)
        parts = [self._select_one(flat_q[a:b], flat_k[c:d], scale) for (a, b), (c, d) in spans]
        chosen = torch.cat([flat_q.new_empty(0, k.shape[-2], self.slots, dtype=torch.int32), *parts])
        return chosen.unflatten(0, q.shape[:2]) if batched else chosen

    def _select_one(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return (N, Hk, slots) of one sequence."""
        seqlen_q, seqlen_k, kv_heads = q.shape[0], k.shape[0], k.shape[1]
        dtype = torch.promote_types(q.dtype, torch.float32)
        chosen = torch.full((seqlen_q, kv_heads, self.slots), -1, dtype=torch.int32, device=q.device)
        keys = k.to(dtype).permute(1, 2, 0)  # (Hk, D, M)
        for some, seen, own in TokenSpans((0, seqlen_q), (0, seqlen_k)).pieces(4 * q.shape[1], SCORE_BYTES):
            position = own.position.to(q.device)
            grouped = q[some].to(dtype).unflatten(1, (kv_heads, -1)).transpose(0, 1)  # (Hk, t, G, D)
            logits = (grouped.flatten(1, 2) @ keys[..., seen] * scale).unflatten(1, grouped.shape[1:3])
            hidden = torch.arange(seen.stop, device=q.device) > position[:, None]
            mass = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1).nan_to_num(0.0).sum(2)  # (Hk, t, M)
            chosen[some] = best_blocks(mass, position, self.block_size, self.slots).transpose(0, 1)
        return chosen


def best_blocks(scores: Tensor, position: Tensor, block_size: int, slots: int) -> Tensor:
    """Return (H, t, slots) int32: blocks with the largest sums of scores (H, t, M), ascending, then -1.

    A query at position p sees the blocks up to p // block_size. Of equal sums the earlier block wins.
    """
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % block_size))
    sums = padded.unflatten(-1, (-1, block_size)).sum(-1)
    counts = (position.div(block_size, rounding_mode="floor") + 1).clamp(min=0).expand(sums.shape[:2])
    if sums.device.type == "cpu" and sums.dtype == torch.float32:
        from dynaxx.trained.tokens.kernels.cpu.indexer import best_scores

        return best_scores(sums.flatten(0, 1), counts.flatten(), slots).unflatten(0, sums.shape[:2])
    return best_of(sums, counts, slots)


def check_queries_and_keys(q: Tensor, k: Tensor) -> None:
    """Raise ValueError if q and k do not fit together."""
    if q.ndim not in (3, 4) or k.ndim != q.ndim:
        raise ValueError(
            "`q` and `k` must both be (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) with "
            f"`cu_seqlens_q`, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.dtype != k.dtype or not q.is_floating_point() or q.device != k.device:
        raise ValueError(
            "`q` and `k` must be floats of one dtype on one device, "
            f"got {q.dtype} on {q.device} and {k.dtype} on {k.device}"
        )
    if q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1] or not q.shape[-1]:
        raise ValueError(f"`q` and `k` must agree in batch and head_dim, got {tuple(q.shape)} and {tuple(k.shape)}")
    if not (q.shape[-2] and k.shape[-2]) or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q_heads must be a multiple of kv_heads, both >= 1, got {q.shape[-2]} and {k.shape[-2]}")
