# SPDX-License-Identifier: Apache-2.0
"""Exchange through memory that other ranks write to, without GPUs: threads or processes stand for them."""

import threading
from collections import defaultdict

import pytest
import torch
from ranks import cases_of, run_cases

from dynaxx.distributed import SequenceSplit, traffic
from dynaxx.distributed.gather import WholeGathering, reaches
from dynaxx.distributed.peer_memory import SLOTS, PeerBuffers, PeerMemory

SLOT_BYTES = 1 << 16


class SharedMemory(PeerMemory):
    """Memory of threads. A signal is sent once the last one of its kind was received, as on a GPU."""

    def __init__(self, rank, whole, signals):
        self.slot_bytes, self.handle = SLOT_BYTES, type("Handle", (), {"rank": rank})
        self._of, self._signals, self._rank = whole, signals, rank

    def signal(self, rank, slot, kind):
        empty, full = self._signals[self._rank, rank, slot, kind]
        assert empty.acquire(timeout=20), "the last signal was never received"
        full.release()

    def wait(self, rank, slot, kind):
        empty, full = self._signals[rank, self._rank, slot, kind]
        assert full.acquire(timeout=20), "no signal arrived"
        empty.release()


def run_ranks(count, run):
    """Run `run(rank, memory)` in a thread per rank; return the results, or raise the first error."""
    signals = defaultdict(lambda: (threading.Semaphore(1), threading.Semaphore(0)))
    for key in ((a, b, s, k) for a in range(count) for b in range(count) for s in range(SLOTS) for k in range(2)):
        signals[key]
    whole = [torch.full((SLOTS * SLOT_BYTES,), 255, dtype=torch.uint8) for _ in range(count)]  # NaN in floats
    results, errors = [None] * count, []

    def guarded(rank):
        try:
            results[rank] = run(rank, SharedMemory(rank, whole, signals))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("count", "kind"), [(2, "zigzag"), (3, "contiguous"), (4, "dealt"), (4, "few")])
def test_ranks_write_to_each_others_buffers(count, kind, causal):
    seqlen, stages = 201, 5
    if kind == "dealt":
        split = SequenceSplit.dealt(seqlen, count, [float(i % 5) for i in range(13)], 16)
    elif kind == "few":
        split = SequenceSplit(seqlen, 128, (2, 0), count)  # two ranks own nothing
    else:
        split = getattr(SequenceSplit, kind)(seqlen, count, 16)
    k, v = (torch.randn(2, seqlen, stages, dim, generator=torch.Generator().manual_seed(dim)) for dim in (8, 4))
    reach = reaches(split, causal)

    def run(rank, memory):
        found, group = [], None
        buffers = PeerBuffers(memory)
        own = [split.shard(x, rank) for x in (k, v)]
        following = None
        for i in range(stages):
            parts = [x[:, :, i : i + 1] for x in own]
            current, following = following, WholeGathering(tuple(parts), split, rank, group, reach, buffers, i)
            if current is not None:
                found.append([x.clone() for x in current.wait()])
        found.append([x.clone() for x in following.wait()])
        return found

    before = traffic()
    for rank, of_stages in enumerate(run_ranks(count, run)):
        for i, (keys, values) in enumerate(of_stages):
            assert torch.equal(keys, k[:, : reach[rank], i : i + 1])
            assert torch.equal(values, v[:, : reach[rank], i : i + 1])
    received = sum(reach[rank] - split.length(rank) for rank in range(count))
    after = traffic()
    assert after.bytes_received - before.bytes_received == received * 2 * 12 * 4 * stages
    assert after.bytes_sent - before.bytes_sent == after.bytes_received - before.bytes_received


def test_a_place_larger_than_the_shared_buffers_is_private():
    run_ranks(1, lambda rank, memory: check_places(memory))


def check_places(memory):
    buffers, like = PeerBuffers(memory), torch.zeros(1)
    small, large = buffers.take(0, like, (4, 4)), buffers.take(0, like, (SLOT_BYTES,))
    own = memory._of[0].untyped_storage().data_ptr()
    assert small.untyped_storage().data_ptr() == own != large.untyped_storage().data_ptr()
    assert buffers.take(1, like, (4,)).data_ptr() - small.data_ptr() == SLOT_BYTES


@pytest.fixture(
    scope="module",
    params=[pytest.param(count, marks=pytest.mark.slow) for count in (2, 3)],
    ids=lambda count: f"{count} ranks",
)
def results(request):
    return run_cases("peer_cases", request.param)


@pytest.mark.parametrize("case", cases_of("peer_cases"))
def test_against_one_device(results, case):
    assert not results[case], "\n".join(results[case])
