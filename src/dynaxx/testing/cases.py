# SPDX-License-Identifier: Apache-2.0
"""Random inputs that try to break kernels: odd lengths, any group size, every pattern, more queries than keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx import patterns as p
from dynaxx.arguments import typed
from dynaxx.layout import BLOCK_SIZES, BlockLayout
from dynaxx.selection import (
    AntiDiagonal,
    ClusterGlobals,
    KeyClusters,
    LastQueryProbe,
    MeanPool,
    MeanQuery,
    MinMax,
    Scorer,
    Selector,
    SimHash,
    Threshold,
    TileQueries,
    TopK,
    TopP,
    TwoStage,
    select_blocks,
)

LENGTHS = (1, 15, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257)


def random_pattern(rng: random.Random, seqlen_k: int) -> p.Pattern:
    """Draw a pattern of any kind, or a combination of two or three."""
    cuts = sorted(rng.sample(range(seqlen_k + 1), min(seqlen_k, 3)))
    rules: tuple[Callable[[], p.Pattern], ...] = (
        lambda: p.SlidingWindow(rng.choice((1, 5, 16, 33, 100))),
        lambda: p.SlidingWindow((rng.randint(-1, 40), rng.randint(-1, 40))),
        lambda: p.Dilated(rng.randint(1, 9), rng.randint(1, 7)),
        lambda: p.Strided(rng.choice((1, 3, 16, 40, 97, 150))),
        lambda: p.GlobalTokens(rng.randint(0, 40), symmetric=rng.random() < 0.5),
        lambda: p.GlobalTokens(tuple(rng.sample(range(seqlen_k), min(seqlen_k, 3))), symmetric=rng.random() < 0.5),
        lambda: p.Sink(rng.randint(0, 5)),
        lambda: p.LastQueries(rng.randint(0, 70)),
        lambda: p.LocalBlocks(rng.randint(1, 3)),
        lambda: p.RandomBlocks(rng.randint(0, 4), seed=rng.randint(0, 9)),
        lambda: p.Documents((0, *cuts, seqlen_k)),
        p.Causal,
        p.Full,
    )
    pattern = rng.choice(rules)()
    for _ in range(rng.randint(0, 2)):
        pattern = pattern | rng.choice(rules)() if rng.random() < 0.6 else pattern & rng.choice(rules)()
    return pattern


def random_scorer(rng: random.Random) -> Scorer:
    """Draw any scorer of the library."""
    scorers: tuple[Callable[[], Scorer], ...] = (
        lambda: MeanQuery(rng.choice((0.5, 0.75, 1.0)), rng.choice(("full", "int8"))),
        lambda: MeanPool(rng.choice((None, 1, 3, 8, 16))),
        lambda: MinMax(rng.choice((1.0, 0.5, 0.0))),
        lambda: LastQueryProbe(rng.choice((1, 64, 1000))),
        lambda: AntiDiagonal(rng.choice((1, 4, 16, 50))),
        lambda: TwoStage(rng.choice((0, 3, 0.0, 0.2, 1.0)), MeanQuery(), rng.choice((1, 4, 32))),
        lambda: SimHash(tables=rng.choice((1, 4)), bits=rng.choice((1, 5)), seed=rng.randint(0, 9)),
        lambda: TileQueries(rng.choice((1, 8, 16, 64)), rng.choice((0.75, 0.9))),
        lambda: KeyClusters(rng.choice((1, 8, 40)), rng.choice((1, 4, 64)), rng.choice((1, 3)), seed=rng.randint(0, 9)),
    )
    return rng.choice(scorers)()


def random_selector(rng: random.Random) -> Selector:
    """Draw a budget and a scorer."""
    scorer = random_scorer(rng)
    budgets: tuple[Callable[[], Selector], ...] = (
        lambda: TopK(rng.randint(0, 4), scorer),
        lambda: TopK(rng.random(), scorer, floor=rng.choice((0, 3))),
        lambda: TopP(rng.random(), scorer),
        lambda: Threshold(rng.random(), "max", scorer),
        lambda: Threshold(2 * rng.random(), "uniform", scorer),
        lambda: ClusterGlobals(rng.randint(0, 3), rng.choice((1, 4, 16)), seed=rng.randint(0, 9)),
    )
    return rng.choice(budgets)()


@dataclass(frozen=True)
class AttentionCase:
    """A random problem: inputs and a layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: BlockLayout
    label: str


@typed
def make_qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw Gaussian q, k, v in the library's shapes, on the CPU so that all devices get the same values."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(
        device=device, dtype=dtype
    )
    return (
        draw(batch, seqlen_q, q_heads, head_dim),
        draw(batch, seqlen_k, kv_heads, head_dim),
        draw(batch, seqlen_k, kv_heads, head_dim_v or head_dim),
    )


@typed
def random_case(
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    head_dims: tuple[int, ...] = (16, 24, 32, 64, 80, 96, 128, 256),
    lengths: tuple[int, ...] = LENGTHS,
    block_sizes: tuple[int, ...] = BLOCK_SIZES,
) -> AttentionCase:
    """Draw a random problem; equal seeds give equal problems on every device."""
    rng = random.Random(seed)
    seqlen_k = rng.choice(lengths)
    seqlen_q = seqlen_k if rng.random() < 0.7 else rng.choice(lengths)
    group_size, kv_heads = rng.choice((1, 2, 3, 4, 5, 7, 8)), rng.choice((1, 2))
    head_dim = rng.choice(head_dims)
    head_dim_v = head_dim if rng.random() < 0.7 else rng.choice(head_dims)
    block_size = (rng.choice(block_sizes), rng.choice(block_sizes))
    causal, batch = rng.random() < 0.7, rng.choice((1, 2))
    heads = group_size * kv_heads if rng.random() < 0.3 else 1
    patterns = [random_pattern(rng, seqlen_k) for _ in range(heads)]
    layouts = [
        rule.layout(seqlen_q, seqlen_k, causal=causal, block_size=block_size, device=device) for rule in patterns
    ]
    q, k, v = make_qkv(batch, seqlen_q, seqlen_k, group_size * kv_heads, kv_heads, head_dim, head_dim_v,
                       dtype=dtype, device=device, seed=seed)  # fmt: skip
    layout, rules = BlockLayout.stack_heads(layouts), repr(patterns)
    if rng.random() < 0.25:  # select from the data instead, on the CPU so that all devices get the same blocks
        hybrid = patterns[0] | random_selector(rng)
        rules = repr(hybrid)
        chosen = select_blocks(q.cpu().float(), k.cpu().float(), hybrid, causal=causal, block_size=block_size)
        layout = chosen.to(device)
    label = (
        f"seed {seed}: {rules} causal={causal} {seqlen_q}x{seqlen_k} batch {batch} heads {q.shape[2]}/{kv_heads} "
        f"dims {head_dim}/{head_dim_v} blocks {block_size}"
    )
    return AttentionCase(q, k, v, layout, label)
