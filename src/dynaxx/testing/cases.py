# SPDX-License-Identifier: Apache-2.0
"""Random inputs that try to break kernels: odd lengths, any group size, every pattern, more queries than keys."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout import BLOCK_SIZES, BlockLayout
from dynaxx.patterns import Pattern
from dynaxx.patterns.base import Combined
from dynaxx.selection import Selector, select_blocks
from dynaxx.settings import registered

LENGTHS = (1, 15, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257)


def random_pattern(rng: random.Random, seqlen_k: int) -> Pattern:
    """Draw a pattern of any registered kind, or a combination of two or three."""
    pattern = _one_pattern(rng, seqlen_k)
    for _ in range(rng.randint(0, 2)):
        other = _one_pattern(rng, seqlen_k)
        pattern = pattern | other if rng.random() < 0.6 else pattern & other
    return pattern


def _one_pattern(rng: random.Random, seqlen_k: int) -> Pattern:
    kinds = [kind for kind in registered(Pattern) if kind.stands_alone and not issubclass(kind, Combined)]
    pattern: Pattern = rng.choice(kinds).random(rng, seqlen_k)
    return pattern.resolve([rng.randrange(9) for _ in range(seqlen_k)])


def random_selector(rng: random.Random) -> Selector:
    """Draw a selector of any registered kind, with any scorer."""
    selector: Selector = rng.choice(registered(Selector)).random(rng, 1)
    return selector


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
