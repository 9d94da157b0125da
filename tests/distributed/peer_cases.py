# SPDX-License-Identifier: Apache-2.0
"""Cases of stages on several streams that ranks copy into each other's buffers, in the order of a GPU's calls.

Processes stand for GPUs: a file that all map stands for the memory that they share, flags in it for signals, and calls
one after another for streams. `ranks.py` runs the cases.
"""

import contextlib
import shutil
import tempfile
import time

import attention_cases
import pytest
import rule_cases
import torch
import torch.distributed as dist
from ranks import COLLECTIVE_SECONDS, Ranks

from dynaxx.distributed import streams
from dynaxx.distributed.by_layout import forward as by_layout
from dynaxx.distributed.by_rule import attention as by_rule
from dynaxx.distributed.by_rule import settings as rule_settings
from dynaxx.distributed.peer_memory import SLOTS, PeerBuffers, PeerMemory

SLOT_BYTES = 8 << 20


class MappedMemory(PeerMemory):
    """Memory of processes. A signal is sent once the last one of its kind was received, as on a GPU."""

    def __init__(self, folder, ranks):
        mapped = lambda name, size: torch.from_file(f"{folder}/{name}", shared=True, size=size, dtype=torch.uint8)
        self.slot_bytes, self.handle = SLOT_BYTES, type("Handle", (), {"rank": ranks.rank})
        self._of = [mapped(rank, SLOTS * SLOT_BYTES) for rank in range(ranks.count)]
        self._flags = mapped("flags", ranks.count**2 * SLOTS * 2).view(ranks.count, ranks.count, SLOTS, 2).numpy()
        self._rank = ranks.rank

    def _flip(self, place, old):
        end = time.monotonic() + COLLECTIVE_SECONDS
        while self._flags[place] != old:
            assert time.monotonic() < end, f"signal {place} never changed"
            time.sleep(1e-5)
        self._flags[place] = 1 - old

    def signal(self, rank, slot, kind):
        self._flip((self._rank, rank, slot, kind), 0)

    def wait(self, rank, slot, kind):
        self._flip((rank, self._rank, slot, kind), 1)


class Stream:
    """A stream whose work is done when it is launched."""

    def wait_event(self, event):
        assert event is not None, "an event is recorded before it is waited for"

    def wait_stream(self, other):
        pass

    def record_event(self):
        return object()


@contextlib.contextmanager
def forked(device, early=None):
    if early is not None:
        early()
    yield streams.Lanes(Stream(), Stream(), Stream())


def on_shared_memory(ranks: Ranks, cases) -> None:
    """Run cases whose stages use the order of calls on a GPU, and memory that all processes map."""
    folder = [tempfile.mkdtemp() if ranks.rank == 0 else None]
    dist.broadcast_object_list(folder)
    for turn in range(2):  # rank 0 makes the files
        if (ranks.rank == 0) == (turn == 0):
            memory = MappedMemory(folder[0], ranks)
        dist.barrier()
    used = []

    def stage_buffers(group, device, slot_bytes):
        used.append(slot_bytes)
        assert slot_bytes <= SLOT_BYTES
        return PeerBuffers(memory)

    def in_stages(stages, group, device, known):
        streams._on_streams(stages, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.Lanes, "forked", staticmethod(forked))
        patch.setattr(torch.cuda, "set_stream", lambda stream: None)
        for module in (by_layout, rule_settings):
            patch.setattr(module, "stage_buffers", stage_buffers)
        for module in (by_layout, by_rule):
            patch.setattr(module, "in_stages", in_stages)
        for case in cases:
            case(ranks)
    assert used, "no case had several stages"
    if ranks.rank == 0:
        shutil.rmtree(folder[0])


def case_layouts(ranks: Ranks):
    on_shared_memory(
        ranks, [attention_cases.case_every_split_and_number_of_stages, attention_cases.case_random_problems]
    )


def case_bytes(ranks: Ranks):
    on_shared_memory(ranks, [attention_cases.case_layouts_per_head_send_less, attention_cases.case_twice_the_same_bits])


def case_rules(ranks: Ranks):
    on_shared_memory(ranks, [rule_cases.case_choosing_and_attending_at_once])
