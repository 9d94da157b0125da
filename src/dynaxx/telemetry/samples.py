# SPDX-License-Identifier: Apache-2.0
"""Measurements of one call: visited blocks, their work, and the overlap between neighbouring rows."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockLayout
from dynaxx.telemetry.recorder import Recorder

MAX_FREE = 256  # events kept per device
ROWS_COMPARED = 64


class Clock:
    """The CPU's monotonic clock, and the interface of others. A mark is opaque to the caller."""

    def mark(self) -> Any:
        """Return a mark at the end of the device's queue of work."""
        return time.perf_counter()

    def ready(self, mark: Any) -> bool:
        """Return whether the device has reached the mark."""
        return True

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks that are ready."""
        return end - start

    def release(self, *marks: Any) -> None:
        """Return marks that are no longer needed."""


class CudaClock(Clock):
    """CUDA events on the stream that was current when the clock was created. Released events are reused."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free = _FREE[self._stream.device_index]

    @override
    def mark(self) -> Any:
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    @override
    def ready(self, mark: Any) -> bool:
        return mark.query()

    @override
    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3

    @override
    def release(self, *marks: Any) -> None:
        self._free.extend(marks)


_FREE: defaultdict[int, deque[Any]] = defaultdict(lambda: deque(maxlen=MAX_FREE))  # events, by device
HOST_CLOCK = Clock()


def clock_of(device: torch.device) -> Clock | None:
    """Return the clock of a device, or None for other kinds of devices and during the capture of a CUDA graph."""
    if device.type == "cpu":
        return HOST_CLOCK
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return CudaClock(device)


@dataclass(frozen=True)
class BlockCounts:
    """The blocks of one call, counted on its device. The copy of the counts to the host may be in progress."""

    counts: Tensor  # (3,) int32 on the host: visited blocks; shared and all blocks of some neighbouring rows
    visible: int  # causally visible blocks
    flops_per_block: int  # over all heads and batch entries that share a visited block
    bytes_per_block: int
    bytes_once: int  # bytes of q and out


@dataclass(frozen=True)
class Sample:
    """One measured call. `marks` are its start, the end of its selection, and its end."""

    layer: int
    phase: str
    backend: str
    clock: Clock
    marks: tuple[Any, Any, Any]
    blocks: BlockCounts | None
    copied: Any  # the mark after which `blocks.counts` are on the host

    @property
    def on_host(self) -> bool:
        """Return whether the call ran on the CPU, so that its times are known."""
        return self.clock is HOST_CLOCK

    def ready(self) -> bool:
        """Return whether the counts are on the host."""
        return self.clock.ready(self.copied)

    def record(self, numbers: Recorder) -> None:
        """Record the sample in the metrics. Call it only when the sample is ready."""
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


class HostSlots:
    """Pinned host memory for counts copied from a GPU, allocated once because each allocation is slow.

    Args:
        size: number of slots, which are reused in turn.
    """

    def __init__(self, size: int) -> None:
        self._turns = cycle(range(size))
        self._size = size
        self._pinned: Tensor | None = None

    def take(self) -> Tensor:
        """Return the next slot, (3,) int32."""
        if self._pinned is None:
            self._pinned = torch.empty(self._size, 3, dtype=torch.int32, pin_memory=True, device="cpu")
        return self._pinned[next(self._turns)]


def count_blocks(q: Tensor, v: Tensor, layout: BlockLayout, slots: HostSlots, overlap: Random | None) -> BlockCounts:
    """Count the blocks of a call without waiting for its device.

    Args:
        q: see `sparse_attention`.
        v: see `sparse_attention`.
        layout: the layout of the call.
        slots: host memory for the counts.
        overlap: random numbers that pick the neighbouring rows to compare; None compares none.
    """
    batch, seqlen_q, q_heads, head_dim = q.shape
    copies = (batch // layout.layout_batch) * (q_heads // layout.layout_heads)
    q_block, kv_block = layout.block_size
    dims = head_dim + v.shape[3]
    counts = slots.take() if layout.device.type == "cuda" else torch.empty(3, dtype=torch.int32, device="cpu")
    counts.zero_()
    if layout.q_blocks:
        counts[:1].copy_(layout.kv_indptr[-1, -1, -1:], non_blocking=True)
    if overlap is not None and layout.q_blocks > 1 and layout.kv_indices.numel():
        counts[1:].copy_(_shared_by_neighbours(layout, overlap), non_blocking=True)
    return BlockCounts(
        counts=counts,
        visible=layout.visible_blocks(),
        flops_per_block=2 * q_block * kv_block * dims * copies,
        bytes_per_block=kv_block * dims * q.element_size() * copies,
        bytes_once=batch * seqlen_q * q_heads * dims * q.element_size(),
    )


@torch.no_grad()
def _shared_by_neighbours(layout: BlockLayout, random: Random) -> Tensor:
    """Count the blocks that two neighbouring rows share and the blocks of either, over some rows of one head.

    Returns (2,) int32.
    """
    b, h = random.randrange(layout.layout_batch), random.randrange(layout.layout_heads)
    first = random.randrange(max(1, layout.q_blocks - ROWS_COMPARED))
    ends = layout.kv_indptr[b, h, first : first + ROWS_COMPARED + 2].long()
    slots = ends[:-1, None] + torch.arange(layout.kv_blocks, device=layout.device)  # a row has no duplicate block
    cols = layout.kv_indices[slots.clamp(max=layout.kv_indices.numel() - 1)].long()
    cols = torch.where(slots < ends[1:, None], cols, layout.kv_blocks)  # slots past the row's end get an extra column
    visited = torch.zeros(cols.shape[0], layout.kv_blocks + 1, dtype=torch.bool, device=layout.device)
    visited.scatter_(1, cols, True)
    a, c = visited[:-1, :-1], visited[1:, :-1]
    return torch.stack([(a & c).sum(dtype=torch.int32), (a | c).sum(dtype=torch.int32)])


class CacheMeter:
    """Set `dynaxx_kv_cache_bytes` to the memory of the live caches whenever metrics are read, until it is collected.

    Args:
        numbers: the recorder to write to.
        caches: a method that returns the caches; it is referenced weakly.
    """

    def __init__(self, numbers: Recorder, caches: Callable[[], Iterable[Any]]) -> None:
        self._numbers = numbers
        self._caches = weakref.WeakMethod(caches)
        numbers.add_source(self)

    def flush(self) -> None:
        """Measure the caches now."""
        caches = self._caches()
        if caches is None:
            return
        try:
            self._numbers.set("dynaxx_kv_cache_bytes", sum(map(cache_bytes, caches())))
        except RuntimeError:  # a request started or ended meanwhile; the next reading counts it
            return


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the keys and values in the filled layers of a transformers cache."""
    tensors = (getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values"))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))
