# SPDX-License-Identifier: Apache-2.0
"""Launches on the core's own threads give the results of OpenMP's threads, and leave those as they were."""

import os
import signal
import threading
import time

import pytest
import torch

import dynaxx as dx
from dynaxx.core import library
from dynaxx.kernels.attention import cpu
from dynaxx.kernels.runtime.core_threads import num_threads
from dynaxx.testing import make_qkv

pytestmark = pytest.mark.skipif(library.active_library() is None, reason="no C++ core here")


@pytest.fixture(autouse=True, params=[2, 5], ids=lambda count: f"{count} threads")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attend(seqlen=257, seed=0):
    q, k, v = make_qkv(2, seqlen, seqlen, 4, 2, 32, seed=seed)
    layout = dx.select_blocks(q, k, dx.SlidingWindow(64) | dx.TopK(0.3), block_size=16)
    return cpu.attention_forward(q, k, v, layout, 0.2)


@pytest.mark.parametrize("seqlen", [1, 17, 257, 900])
def test_the_results_are_the_same(seqlen, threads):
    expected = attend(seqlen)
    with cpu.own_threads():
        assert (num_threads(), torch.get_num_threads()) == (threads, 1)
        found = attend(seqlen)
    assert all(map(torch.equal, found, expected))
    assert (num_threads(), torch.get_num_threads()) == (threads, threads)


def test_they_are_given_back_after_errors_and_once(threads):
    with pytest.raises(ZeroDivisionError), cpu.own_threads(), cpu.own_threads():
        1 / 0  # noqa: B018
    assert (num_threads(), torch.get_num_threads()) == (threads, threads)
    with cpu.own_threads():
        with cpu.own_threads():
            pass
        assert (num_threads(), torch.get_num_threads()) == (threads, 1)


def test_other_threads_keep_theirs(threads):
    found = []
    with cpu.own_threads():
        other = threading.Thread(target=lambda: found.append(num_threads()))
        other.start()
        other.join()
    assert found == [torch.get_num_threads()]


def test_many_callers_at_once():
    """One call has the team; the others run on their callers' threads alone."""
    expected = [attend(200 + 13 * seed, seed) for seed in range(4)]
    wrong = []

    def work(seed):
        with cpu.own_threads():
            for _ in range(25):
                if not all(map(torch.equal, attend(200 + 13 * seed, seed), expected[seed])):
                    wrong.append(seed)

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)


def test_they_sleep_between_launches():
    """OpenMP's workers spin for milliseconds after a launch, at the cost of the threads of an engine around it."""
    with cpu.own_threads():
        attend()
        spent = []
        for _ in range(20):
            attend(40)
            begin = time.process_time()
            time.sleep(0.01)
            spent.append(time.process_time() - begin)
    assert sorted(spent)[10] < 0.002, spent


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_runs_alone():
    with cpu.own_threads():
        expected = attend()
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            os._exit(0 if all(map(torch.equal, attend(), expected)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_without_a_core_nothing_changes(monkeypatch, threads):
    monkeypatch.setenv(library.ISA_VARIABLE, "torch")
    with cpu.own_threads():
        assert (num_threads(), torch.get_num_threads()) == (threads, threads)
