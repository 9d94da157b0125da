# SPDX-License-Identifier: Apache-2.0
"""Workloads of the GPU suite: shapes, layouts and inputs. bf16; heads are q / kv heads."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout
from dynaxx.lazy import lazy
from dynaxx.patterns import Causal, SlidingWindow
from dynaxx.patterns.packed import packed_layout

RAGGED = tuple(100 + (20000 - 100) * i // 15 for i in range(16))
EQUAL = (sum(RAGGED) // 16 // 128 * 128,) * 16


@dataclass(frozen=True)
class Workload:
    """Random blocks of a density, a causal sliding window, or every causal pair; packed if it has lengths."""

    name: str
    seqlen: int
    density: float | None = None
    window: int | None = None
    block_size: int = 128
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    softcap: float | None = None
    lengths: tuple[int, ...] = ()
    dense_peers: bool = True  # at 128k a dense pass takes most of a second
    batch: int = 1
    causal: bool = True  # else only with a density: as many random blocks in every row

    def layout(self, device: torch.device, seed: int) -> BlockLayout:
        """Return the layout of a seed."""
        if self.lengths:
            ends = torch.tensor([0, *self.lengths], dtype=torch.int64, device="cpu").cumsum(0).int()
            return packed_layout(self._window, ends, block_size=self.block_size, device=device)
        if self.window is not None:
            return self._window.layout(self.seqlen, block_size=self.block_size, device=device)
        if self.density is None:
            return Causal().layout(self.seqlen, block_size=self.block_size, device=device)
        if not self.causal:
            return random_layout(self.seqlen, self.density, self.block_size, device, seed)
        return random_causal_layout(self.seqlen, self.density, self.block_size, device, seed)

    def inputs(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q, k, v with gradients."""
        generator = torch.Generator(device).manual_seed(seed)
        lead = (sum(self.lengths),) if self.lengths else (self.batch, self.seqlen)
        q, k, v = (
            torch.randn(*lead, heads, self.head_dim, generator=generator, device=device, dtype=torch.bfloat16)
            for heads in (self.heads[0], self.heads[1], self.heads[1])
        )
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def flops(self, layout: BlockLayout) -> int:
        """Return FLOPs of the forward: 4 * head_dim * q_heads * visible pairs. The backward has 2.5 times as many."""
        pairs = float(layout.to("cpu").visible_pairs().double().mean(1).sum())
        return round(4 * self.head_dim * self.heads[0] * self.batch * pairs)

    @property
    def dense_flops(self) -> int:
        """FLOPs of dense attention."""
        pairs = self.seqlen * (self.seqlen + 1) // 2 if self.causal else self.seqlen**2
        return 4 * self.head_dim * self.heads[0] * self.batch * pairs

    @lazy
    def _window(self) -> SlidingWindow:
        return SlidingWindow(self.window or 1)


def random_causal_layout(seqlen: int, density: float, block: int, device: torch.device, seed: int) -> BlockLayout:
    """Choose the diagonal and a share `density` of the blocks below it."""
    blocks = -(-seqlen // block)
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(blocks, blocks, generator=generator, dtype=torch.float32, device="cpu") < density).tril(
        -1
    ) | torch.eye(blocks, dtype=torch.bool, device="cpu")
    indices = torch.where(chosen, torch.arange(blocks, device="cpu"), -1).sort(-1, descending=True).values
    indices = indices[:, : int(chosen.sum(-1).max())]
    return BlockLayout.from_block_indices(indices[None, None], seqlen, block_size=block).to(device)


def random_layout(seqlen: int, density: float, block: int, device: torch.device, seed: int) -> BlockLayout:
    """Choose as many blocks in every row, without a causal mask."""
    blocks = -(-seqlen // block)
    draw = torch.rand(
        1, 1, blocks, blocks, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
    )
    indices = draw.argsort(-1)[..., : max(1, round(density * blocks))]
    return BlockLayout.from_block_indices(indices, seqlen, block_size=block, causal=False).to(device)


def sampled_workloads(count: int, seed: int) -> tuple[Workload, ...]:
    """Draw problems of the sizes that models have: every third without a causal mask and with equal heads of 128."""
    draw = random.Random(seed)
    return tuple(_sampled(index, draw) for index in range(count))


def _sampled(index: int, draw: random.Random) -> Workload:
    causal = index % 3 != 2
    q_heads = draw.choice(Q_HEADS)
    group = draw.choice([size for size in range(1, 17) if q_heads % size == 0]) if causal else 1
    head_dim = draw.choice(HEAD_DIMS) if causal else 128
    block_size = draw.choice((64, 128))
    seqlen = draw.choice((2048, 4096, 6144, 8192, 16384, 32768, draw.randint(1500, 20000)))
    elements = seqlen * q_heads * head_dim
    batch = draw.choice([size for size in (1, 2, 4, 8) if size == 1 or size * elements <= MAX_ELEMENTS])
    kind = draw.choice(("density", "density", "window", "every pair")) if causal else "density"
    density = draw.choice((0.05, 0.1, 0.2, 0.4)) if kind == "density" else None
    window = draw.choice((512, 1024, 1500, 4096)) if kind == "window" else None
    what = f"{density:.0%}" if density else f"window {window}" if window else kind
    heads = (q_heads, q_heads // group)
    name = (
        f"sample {index}: {batch} x {seqlen}, {what}{'' if causal else ' not causal'}, "
        f"{heads[0]}/{heads[1]} heads of {head_dim}, blocks of {block_size}"
    )
    return Workload(
        name, seqlen, density, window, block_size, heads, head_dim, dense_peers=False, batch=batch, causal=causal
    )


Q_HEADS = (12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128)
HEAD_DIMS = (64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
MAX_ELEMENTS = 1 << 28  # of q

MAIN = Workload("random 10 %", 32768, density=0.1)
WORKLOADS = (
    MAIN,
    Workload("random 30 %", 32768, density=0.3),
    Workload("random 20 % of 8k", 8192, density=0.2),
    Workload("window 1024", 32768, window=1024),
    Workload("window 4096", 32768, window=4096),
    Workload("blocks of 64", 32768, density=0.1, block_size=64),
    Workload("blocks of 64, 128k", 131072, density=0.1, block_size=64, dense_peers=False),
    Workload("density 1.0", 32768),
    Workload("head_dim 64", 32768, density=0.1, head_dim=64),
    Workload("head_dim 256", 32768, density=0.1, heads=(16, 4), head_dim=256),
    Workload("softcap random", 32768, density=0.1, heads=(32, 16), softcap=50.0),  # heads of Gemma 2 27B; below, 9B
    Workload("softcap window", 32768, window=4096, heads=(32, 16), softcap=50.0),
    Workload("softcap random 256", 32768, density=0.1, heads=(16, 8), head_dim=256, softcap=50.0),
    Workload("softcap window 256", 32768, window=4096, heads=(16, 8), head_dim=256, softcap=50.0),
    Workload("group 1", 32768, density=0.1, heads=(32, 32)),
    Workload("group 7", 32768, density=0.1, heads=(28, 4)),
    Workload("group 8", 32768, density=0.1, heads=(32, 4)),
    Workload("group 7, 15 % of 24k", 24576, density=0.15, heads=(28, 4)),
    Workload("group 7, 20 % of 8k", 8192, density=0.2, heads=(28, 4)),
    Workload("group 7, every pair of 24k", 24576, heads=(28, 4)),
    Workload("group 8, 15 % of 24k", 24576, density=0.15, heads=(32, 4)),
    Workload("group 8, 20 % of 8k", 8192, density=0.2, heads=(32, 4)),
    Workload("group 8, every pair of 16k", 16384, heads=(32, 4)),
    Workload("ragged", max(RAGGED), window=4096, lengths=RAGGED, dense_peers=False),
    Workload("equal", max(EQUAL), window=4096, lengths=EQUAL, dense_peers=False),
)
