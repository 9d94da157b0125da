"""What a measured call says: how many blocks it visited, how much work that is, how neighbours' blocks overlap."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout
from dynaxx.telemetry.clocks import Clock
from dynaxx.telemetry.recorder import Recorder

ROWS_COMPARED = 64


@dataclass(frozen=True)
class Blocks:
    """The blocks of one call, counted on its device and on their way to the host."""

    counts: Tensor  # (3,) int64 on the host: visited; of some neighbouring rows: shared and all. Valid when copied
    visible: int  # causally visible blocks
    flops_per_block: int  # over all heads and batch entries that share a visited block
    bytes_per_block: int
    bytes_once: int  # q and out


@dataclass(frozen=True)
class Sample:
    """One measured call; `marks` are its start, the end of its selection, its end."""

    layer: int
    phase: str
    backend: str
    clock: Clock
    marks: tuple[Any, Any, Any]
    blocks: Blocks | None
    copied: Any  # the mark after which `blocks.counts` are on the host

    def ready(self) -> bool:
        return self.clock.ready(self.copied)

    def record(self, numbers: Recorder) -> None:
        """Put it into the metrics; only when it is ready."""
        started, selected, ended = self.marks
        seconds = self.clock.seconds(selected, ended)
        where = {"backend": self.backend, "phase": self.phase}
        numbers.observe("dynaxx_attention_seconds", seconds, **where)
        if self.blocks is None:
            return
        blocks = self.blocks
        visited, shared, union = blocks.counts.tolist()
        density = visited / max(1, blocks.visible)
        numbers.observe("dynaxx_selection_seconds", self.clock.seconds(started, selected), **where)
        numbers.observe("dynaxx_density_ratio", density, phase=self.phase)
        numbers.set("dynaxx_layer_density_ratio", density, layer=self.layer)
        numbers.add("dynaxx_attention_flops_total", visited * blocks.flops_per_block, **where)
        numbers.add("dynaxx_attention_bytes_total", visited * blocks.bytes_per_block + blocks.bytes_once, **where)
        if union:
            numbers.observe("dynaxx_overlap_ratio", shared / union, phase=self.phase)


def count_blocks(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, random: Random, overlap: bool) -> Blocks:
    """Count the blocks of a call without waiting for its device. q, k, v as `sparse_attention` takes them."""
    batch, seqlen_q, q_heads, head_dim = q.shape
    copies = (batch // layout.layout_batch) * (q_heads // layout.layout_heads)
    q_block, kv_block = layout.block_size
    dims = head_dim + v.shape[3]
    visited = layout.kv_indptr.flatten()[-1:].long() if layout.q_blocks else layout.kv_indptr.new_zeros(1).long()
    overlap = overlap and layout.q_blocks > 1 and layout.kv_indices.numel() > 0
    shared = _shared_by_neighbours(layout, random) if overlap else visited.new_zeros(2)
    counts = torch.cat([visited, shared])
    return Blocks(
        counts=counts if counts.device.type == "cpu" else _to_host(counts),
        visible=layout.visible_blocks(),
        flops_per_block=2 * q_block * kv_block * dims * copies,
        bytes_per_block=kv_block * dims * q.element_size() * copies,
        bytes_once=batch * seqlen_q * q_heads * dims * q.element_size(),
    )


@torch.no_grad()
def _shared_by_neighbours(layout: BlockLayout, random: Random) -> Tensor:
    """(2,) int64: blocks shared by each two neighbouring rows, and blocks of either; over some rows of one head."""
    b, h = random.randrange(layout.layout_batch), random.randrange(layout.layout_heads)
    first = random.randrange(max(1, layout.q_blocks - ROWS_COMPARED))
    ends = layout.kv_indptr[b, h, first : first + ROWS_COMPARED + 2].long()
    slots = ends[:-1, None] + torch.arange(layout.kv_blocks, device=layout.device)  # a row has no block twice
    cols = layout.kv_indices[slots.clamp(max=layout.kv_indices.numel() - 1)].long()
    cols = torch.where(slots < ends[1:, None], cols, layout.kv_blocks)  # past the row's end: a column of their own
    visited = torch.zeros(cols.shape[0], layout.kv_blocks + 1, dtype=torch.bool, device=layout.device)
    visited.scatter_(1, cols, True)
    a, c = visited[:-1, :-1], visited[1:, :-1]
    return torch.stack([(a & c).sum(), (a | c).sum()])


def _to_host(counts: Tensor) -> Tensor:
    """A copy in pinned memory, which arrives when the stream gets there."""
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    return host.copy_(counts, non_blocking=True)
