# SPDX-License-Identifier: Apache-2.0
"""Random problems for selected attention, over blocks or tokens, checked against fp64 with derived budgets."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dynaxx.testing.cases import make_qkv
from dynaxx.testing.oracle import ErrorReport, check_forward, check_gradients
from dynaxx.trained.selected import selected_attention
from dynaxx.trained.tokens.kernels.reference.attention import token_mask
from dynaxx.trained.tokens.spans import TokenSpans


@dataclass(frozen=True)
class SelectedCase:
    """A packed random problem. It takes the place of a layout in `check_forward` and `check_gradients`."""

    q: Tensor  # (1, tokens_q, q_heads, head_dim)
    k: Tensor
    v: Tensor
    block_indices: Tensor  # (tokens_q, select_heads, slots) int32
    spans: TokenSpans
    label: str
    softcap: float | None = None

    def to_dense(self) -> Tensor:
        """Return which pairs are visible, (1, q_heads, seqlen_q, seqlen_k) bool."""
        mask = token_mask(self.block_indices, self.spans)
        return mask.repeat_interleave(self.q.shape[2] // mask.shape[0], 0)[None]

    def attend(self, backend: str) -> Any:
        """Return a function for `check_forward` and `check_gradients`."""

        def run(q: Tensor, k: Tensor, v: Tensor, case: Any) -> tuple[Tensor, Tensor]:
            result = selected_attention(
                q[0],
                k[0],
                v[0],
                self.block_indices,
                block_size=self.spans.block_size,
                cu_seqlens_q=self.spans.ends_q,
                cu_seqlens_k=self.spans.ends_k,
                softcap=self.softcap,
                return_lse=True,
                backend=backend,
            )
            return result[0][None], result[1][None]

        return run

    def check(self, backend: str, gradients: bool = True) -> list[ErrorReport]:
        """Report the errors of a backend against fp64, with their budgets."""
        parts: tuple[Any, ...] = (self.attend(backend), self.q, self.k, self.v, self)
        reports = check_forward(*parts, softcap=self.softcap)
        if not gradients or not min(self.q.shape[1], self.k.shape[1]):
            return reports
        return reports + check_gradients(*parts, softcap=self.softcap)


def random_selected_case(
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    head_dims: tuple[int, ...] = (8, 16, 24, 64),
    lengths: tuple[int, ...] = (0, 1, 17, 50, 77),
    groups: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 16, 17, 32),
    blocks: tuple[int, ...] = (16, 32, 64, 128),
    slots: tuple[int, ...] = (1, 3, 6),
) -> SelectedCase:
    """Draw ragged sequences: any group size and head_dim_v, rows without blocks, blocks after the query."""
    rng = random.Random(seed)
    lengths_q = [rng.choice(lengths) for _ in range(rng.choice((1, 1, 3)))]
    lengths_k = [n if rng.random() < 0.6 else max(1, n + rng.choice((-3, 1, 40))) for n in lengths_q]
    ends_q, ends_k = (tuple(sum(some[:i]) for i in range(len(some) + 1)) for some in (lengths_q, lengths_k))
    block, count = rng.choice(blocks), rng.choice(slots)
    group, kv_heads = rng.choice(groups), rng.choice((1, 2))
    head_dim = rng.choice(head_dims)
    head_dim_v = head_dim if rng.random() < 0.7 else rng.choice(head_dims)
    heads = kv_heads if rng.random() < 0.7 else kv_heads * rng.choice([n for n in (1, 2, 3, group) if group % n == 0])
    spans = TokenSpans(ends_q, ends_k, block)
    indices = random_choices(rng, spans, heads, count, overlap=rng.choice((0.0, 0.8)))
    q, k, v = make_qkv(1, ends_q[-1], ends_k[-1], group * kv_heads, kv_heads, head_dim, head_dim_v,
                       dtype=dtype, device=device, seed=seed)  # fmt: skip
    label = (
        f"seed {seed}: lengths {lengths_q} x {lengths_k} heads {q.shape[2]}/{kv_heads}, {heads} selecting, "
        f"dims {head_dim}/{head_dim_v}, {count} blocks of {block}"
    )
    return SelectedCase(q, k, v, indices.to(device), spans, label)


def random_choices(rng: random.Random, spans: TokenSpans, heads: int, count: int, overlap: float = 0.0) -> Tensor:
    """Draw blocks of each query's own sequence, in any order with empty slots: (tokens_q, heads, count) int32.

    Args:
        rng: random generator.
        spans: the sequences and the size of blocks.
        heads: number of selection heads.
        count: slots per query.
        overlap: probability that a query reuses the blocks of the previous query.
    """
    rows = []
    for (a, b), (c, d) in zip(pairwise(spans.ends_q), pairwise(spans.ends_k), strict=True):
        blocks = -(-(d - c) // spans.block_size)
        before: list[list[int]] = [[] for _ in range(heads)]
        for _ in range(b - a):
            for h in range(heads):
                if not before[h] or rng.random() >= overlap:
                    mine = rng.sample(range(blocks), min(blocks, rng.randint(0, count)))
                    before[h] = mine + [-1] * (count - len(mine))
                    rng.shuffle(before[h])
                rows.append(before[h])
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(spans.ends_q[-1], heads, count)
