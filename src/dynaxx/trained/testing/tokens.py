# SPDX-License-Identifier: Apache-2.0
"""Draw random problems of attention over chosen tokens."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from dynaxx.testing.cases import make_qkv
from dynaxx.testing.oracle import ErrorReport
from dynaxx.trained.selected import selected_attention
from dynaxx.trained.testing.nsa import SelectedCase, random_choices
from dynaxx.trained.tokens.spans import TokenSpans


def random_token_case(
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    head_dims: tuple[tuple[int, int], ...] = ((8, 8), (24, 16), (64, 64), (100, 60), (144, 128)),
    lengths: tuple[int, ...] = (0, 1, 17, 63, 90),
    groups: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 16, 17),
    block_sizes: tuple[int, ...] = (1, 1, 2, 4, 8),
    slots: tuple[int, ...] = (1, 3, 30, 70),
    softcaps: tuple[float | None, ...] = (None, None, 5.0),
) -> SelectedCase:
    """Draw ragged sequences by seed: any group, heads that choose together or apart, empty rows, keys of the future."""
    rng = random.Random(seed)
    lengths_q = [rng.choice(lengths) for _ in range(rng.choice((1, 1, 3)))]
    lengths_k = [n if rng.random() < 0.6 else max(1, n + rng.choice((-3, 1, 40))) for n in lengths_q]
    ends_q, ends_k = (tuple(sum(some[:i]) for i in range(len(some) + 1)) for some in (lengths_q, lengths_k))
    spans = TokenSpans(ends_q, ends_k, rng.choice(block_sizes))
    group, kv_heads = rng.choice(groups), rng.choice((1, 2))
    head_dim, head_dim_v = rng.choice(head_dims)
    heads = rng.choice(sorted({1, kv_heads, kv_heads * group}))
    indices = random_choices(rng, spans, heads, rng.choice(slots), overlap=rng.choice((0.0, 0.8)))
    q, k, v = make_qkv(1, ends_q[-1], ends_k[-1], group * kv_heads, kv_heads, head_dim, head_dim_v,
                       dtype=dtype, device=device, seed=seed)  # fmt: skip
    softcap = rng.choice(softcaps)
    label = (
        f"seed {seed}: lengths {lengths_q} x {lengths_k} heads {q.shape[2]}/{kv_heads}, {heads} selecting, "
        f"dims {head_dim}/{head_dim_v}, {indices.shape[2]} blocks of {spans.block_size}, softcap {softcap}"
    )
    return SelectedCase(q, k, v, indices.to(device), spans, label, softcap)


def latent_errors(
    queries: int,
    keys: int,
    slots: int,
    *,
    heads: int,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    gradients: bool = True,
) -> list[ErrorReport]:
    """Report the errors of latent attention against fp64, relative to the norm of each result.

    The values are a view of the first 512 of 576 columns of one kv head, as the kernels for it need. The lists of the
    tokens that a query chose have any order and empty slots.
    """
    draw = torch.Generator(device).manual_seed(queries + slots)
    normal = lambda *shape: torch.randn(shape, generator=draw, device=device, dtype=torch.float32).to(dtype)
    latent, q = normal(1, keys, 1, 576).requires_grad_(gradients), normal(1, queries, heads, 576)
    q.requires_grad_(gradients)
    chosen = torch.rand(queries, keys, generator=draw, device=device, dtype=torch.float32).argsort(1)[:, :slots].int()
    chosen[torch.rand(chosen.shape, generator=draw, device=device, dtype=torch.float32) < 0.1] = -1

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        x = latent.to(dtype)
        out, lse = selected_attention(q.to(dtype), x, x[..., :512], chosen[None, :, None], block_size=1, scale=0.05,
                                      return_lse=True, backend=backend)  # fmt: skip
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        if not gradients:
            return [out.double(), lse.double()]
        found = torch.autograd.grad(out.square().sum() + lse.sin().sum(), (q, latent))
        return [x.detach().double() for x in (out, lse, *found)]

    names = ("out", "lse", "dq", "dlatent")
    pairs = zip(names, run(dtype, backend), run(torch.float64, "reference"), strict=False)
    return [ErrorReport(name, float((got - exact).norm()), 1e-2 * float(exact.norm())) for name, got, exact in pairs]
