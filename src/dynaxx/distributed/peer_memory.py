# SPDX-License-Identifier: Apache-2.0
"""Exchange by a GPU's copy engines, through memory that the GPUs of one host share (torch's symmetric memory).

NCCL's exchange occupies up to 32 multiprocessors from its start until the last message has arrived. A copy engine
needs none. A rank writes its tokens into the buffers of the others:

    receiver   its buffer is free: signal FREE to each sender              wait for ARRIVED of each sender
    sender                         wait for FREE of each receiver, copy, signal ARRIVED

A signal is a kernel of one program. The buffers stay allocated between calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from math import prod
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from dynaxx.distributed.exchange import Buffers, Messages, Transfer, count_traffic
from dynaxx.distributed.streams import TRUE

SLOTS = 2
FREE, ARRIVED = 0, 1  # kinds of signals of a slot


def copies_between_gpus(group: ProcessGroup) -> bool:
    """Return whether a group exchanges by copy engines: with DYNAXX_COPY_ENGINES=1, set for all its ranks."""
    return os.environ.get("DYNAXX_COPY_ENGINES", "").lower() in TRUE and dist.get_backend(group) == "nccl"


def stage_buffers(group: ProcessGroup, device: torch.device, slot_bytes: int) -> Buffers:
    """Return the two buffers of a call's stages. All ranks must call it with the same number.

    Args:
        group: the ranks.
        device: the GPU of this rank, or the CPU.
        slot_bytes: size of the largest buffer that any rank needs.
    """
    if device.type != "cuda" or not copies_between_gpus(group):
        return Buffers()
    name = group.group_name
    known = _memory.get(name)
    if known is not None and known.group() is not group:  # another group had the name
        del known, _memory[name]
        known = None
    if known is None or known.slot_bytes < slot_bytes:
        if known is not None:  # no rank may still write to the memory, or read it
            torch.cuda.synchronize(device)
            dist.barrier(group)
            del known, _memory[name]
        _memory[name] = PeerMemory(group, device, slot_bytes)
    return PeerBuffers(_memory[name])


def peer_memory_bytes(group: ProcessGroup) -> int:
    """Return the bytes of shared memory that this rank holds for a group, which torch's allocator does not count."""
    known = _memory.get(group.group_name)
    return 0 if known is None else SLOTS * known.slot_bytes


class PeerMemory:
    """Two buffers of every rank of a group, which all other ranks can write to.

    Args:
        group: ranks on one host, whose GPUs can access each other's memory.
        device: the GPU of this rank.
        slot_bytes: size of each buffer, equal on all ranks.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, slot_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.group = ref(group)
        self.slot_bytes = slot_bytes = -(-slot_bytes // 4096) * 4096
        self.own = symmetric_memory.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.own, group.group_name)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._of = [
            self.own if to == rank else self.handle.get_buffer(to, (SLOTS * slot_bytes,), torch.uint8)
            for to in range(ranks)
        ]
        timeout = getattr(group._get_backend(device), "options", None)
        seconds = timeout._timeout.total_seconds() if timeout is not None else 600.0
        self.timeout_ms = int(seconds * 1e3)

    def place(self, rank: int, slot: int, first: int, size: int) -> Tensor:
        """Return `size` bytes of a rank's buffer, from byte `first`."""
        begin = slot * self.slot_bytes + first
        return self._of[rank][begin : begin + size]

    def signal(self, rank: int, slot: int, kind: int) -> None:
        """Send a signal to a rank, once it has received the last one of this kind."""
        self.handle.put_signal(rank, SLOTS * slot + kind, self.timeout_ms)

    def wait(self, rank: int, slot: int, kind: int) -> None:
        """Wait for a rank's signal on the current stream."""
        self.handle.wait_signal(rank, SLOTS * slot + kind, self.timeout_ms)


_memory: dict[str, PeerMemory] = {}


class PeerBuffers(Buffers):
    """The buffers of one call in memory that other ranks can write to."""

    by_copy_engines = True

    def __init__(self, memory: PeerMemory) -> None:
        super().__init__()
        self._memory = memory

    @override
    def take(self, turn: int, like: Tensor, shape: Sequence[int]) -> Tensor:
        size = prod(shape) * like.itemsize
        if size > self._memory.slot_bytes:  # a place for results, which no other rank writes to
            return super().take(turn, like, shape)
        rank = self._memory.handle.rank
        return self._memory.place(rank, turn % SLOTS, 0, size).view(like.dtype).view(*shape)

    @override
    def open(self, turn: int, sources: Iterable[int]) -> None:
        for rank in sources:
            self._memory.signal(rank, turn % SLOTS, FREE)

    @override
    def exchange(
        self, turn: int, sends: Messages, places: Sequence[int], receives: Messages, group: ProcessGroup, doing: str
    ) -> Transfer:
        return PeerTransfer(self._memory, turn % SLOTS, sends, places, receives, group, doing)


class PeerTransfer(Transfer):
    """Messages in transit to and from the buffers of other ranks, which `PeerBuffers.open` announced."""

    def __init__(
        self,
        memory: PeerMemory,
        slot: int,
        sends: Messages,
        places: Sequence[int],
        receives: Messages,
        group: ProcessGroup,
        doing: str,
    ) -> None:
        super().__init__([], [], group, doing)
        self._memory, self._slot, self._held = memory, slot, (sends, receives)
        count_traffic(sends, receives)
        targets = list(dict.fromkeys(rank for rank, x in sends if x.numel()))
        self._sources = list(dict.fromkeys(rank for rank, x in receives if x.numel()))
        for to in targets:
            memory.wait(to, slot, FREE)
            for (rank, x), first in zip(sends, places, strict=True):
                if rank == to and x.numel():
                    memory.place(to, slot, first, x.nbytes).view(x.dtype).view(x.shape).copy_(x)
            memory.signal(to, slot, ARRIVED)

    @override
    def wait(self) -> None:
        for rank in self._sources:
            self._memory.wait(rank, self._slot, ARRIVED)
        self._sources, self._held = [], ([], [])
