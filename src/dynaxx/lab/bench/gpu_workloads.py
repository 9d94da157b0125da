# SPDX-License-Identifier: Apache-2.0
"""Workloads of the GPU suite: shapes, layouts and inputs. bf16, batch 1, causal; heads are q / kv heads."""

from __future__ import annotations

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
    """Random causal blocks of a density, a sliding window, or every causal pair; packed if it has lengths."""

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

    def layout(self, device: torch.device, seed: int) -> BlockLayout:
        """Return the layout of a seed."""
        if self.lengths:
            ends = torch.tensor([0, *self.lengths], dtype=torch.int64, device="cpu").cumsum(0).int()
            return packed_layout(self._window, ends, block_size=self.block_size, device=device)
        if self.window is not None:
            return self._window.layout(self.seqlen, block_size=self.block_size, device=device)
        if self.density is None:
            return Causal().layout(self.seqlen, block_size=self.block_size, device=device)
        return random_causal_layout(self.seqlen, self.density, self.block_size, device, seed)

    def inputs(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q, k, v with gradients."""
        generator = torch.Generator(device).manual_seed(seed)
        lead = (sum(self.lengths),) if self.lengths else (1, self.seqlen)
        q, k, v = (
            torch.randn(*lead, heads, self.head_dim, generator=generator, device=device, dtype=torch.bfloat16)
            for heads in (self.heads[0], self.heads[1], self.heads[1])
        )
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def flops(self, layout: BlockLayout) -> int:
        """Return FLOPs of the forward: 4 * head_dim * q_heads * visible pairs. The backward has 2.5 times as many."""
        return round(4 * self.head_dim * self.heads[0] * float(layout.to("cpu").visible_pairs().double().mean(1).sum()))

    @property
    def dense_flops(self) -> int:
        """FLOPs of dense causal attention."""
        return 2 * self.head_dim * self.heads[0] * self.seqlen * (self.seqlen + 1)

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
