# SPDX-License-Identifier: Apache-2.0
"""A child that is forked while other threads hold locks goes on, and knows which threads it does not have."""

import faulthandler
import os
import threading
import traceback

import pytest

import dynaxx as dx
from dynaxx import forks
from dynaxx.core import cached_library
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.runtime.statistics_file import StatisticsFile
from dynaxx.kernels.attention.triton import tuned_tiles
from dynaxx.policy import ModelFacts, PolicyFollower, save_policy
from dynaxx.telemetry import Recorder
from dynaxx.telemetry.files import SnapshotFile
from dynaxx.telemetry.http import Answer, HttpServer

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
SECONDS = 20


def forked(run):
    """Run a function in a forked child; return its exit code, 1 with its traceback if it hangs."""
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def policy(**fields):
    facts = ModelFacts(model_type="llama", layers=2, q_heads=4, kv_heads=2, head_dim=16)
    return dx.Policy(model=facts, block_size=16, rules=[dx.Rule.of(dx.SlidingWindow(64))], **fields)


class Everything:
    """One object of each kind that has a lock, an event or a thread."""

    def __init__(self, folder):
        save_policy(policy(), folder / "policy.json")
        self.taken = []
        self.numbers = Recorder(strict=True)
        self.counts = Counts(self.numbers)
        self.background = Background(self.taken.append)
        self.follower = PolicyFollower(folder / "policy.json", self.accept, interval=0.01)
        self.server = HttpServer(lambda path: Answer(200, "text/plain", b""), 0, "127.0.0.1", "test")
        self.snapshot = SnapshotFile(folder / "snapshot.json", interval=0.01, numbers=self.numbers)
        self.statistics = StatisticsFile(folder / "statistics.json", self.no_profile, self.numbers, 0.01)
        self.follower.start()

    def accept(self, found):
        self.taken.append(found)
        return True

    def no_profile(self):
        return None

    def use(self):
        self.counts.sparse()
        self.counts.dense(DenseReason.NO_RULE)
        self.counts.to_dict()
        self.numbers.event("drift_gone")
        self.numbers.snapshot()
        self.background.submit(lambda: None)
        self.follower.check()

    def close(self):
        self.background.drain()
        self.background.stop()
        self.follower.stop()
        self.snapshot.close()
        self.statistics.stop()
        self.server.close()


@pytest.fixture
def everything(tmp_path):
    made = Everything(tmp_path)
    yield made
    made.close()


def test_every_lock_is_free_in_a_child(everything):
    locks, hold, held = list(forks._locks), threading.Event(), threading.Event()

    def keep():
        with_lock = [lock for lock in locks if lock.acquire(timeout=10)]
        events = [event._cond for event in list(forks._events)]
        for condition in events:
            condition.acquire()
        held.set()
        hold.wait(SECONDS)
        for each in (*events, *with_lock):
            each.release()

    thread = threading.Thread(target=keep)
    thread.start()
    assert held.wait(SECONDS)

    def child():
        everything.use()
        everything.close()

    found = forked(child)
    hold.set()
    thread.join()
    assert found == 0


def test_sixty_children_of_a_busy_process_end(everything):
    ended, failed = threading.Event(), []

    def busy():
        try:
            while not ended.is_set():
                everything.use()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    found = [forked(everything.use) for _ in range(60)]
    ended.set()
    for thread in threads:
        thread.join()
    assert found == [0] * 60
    assert not failed


def test_a_child_has_its_own_threads_and_leaves_the_port_and_the_files_to_its_parent(everything, tmp_path):
    everything.background.submit(lambda: None)
    everything.background.drain()
    port, before = everything.server.port, threading.active_count()

    def child():
        assert threading.active_count() < before
        assert everything.follower.check()  # read anew
        jobs = []
        everything.background.submit(lambda: jobs.append(os.getpid()))
        everything.background.drain()
        assert jobs == [os.getpid()]
        everything.server.close()
        everything.server.wait()
        everything.statistics.stop()
        assert not everything.statistics.write()

    assert forked(child) == 0
    everything.server.close()
    again = HttpServer(lambda path: Answer(200, "text/plain", b""), port, "127.0.0.1", "test")
    again.close()


def test_a_stopped_background_stays_stopped_in_a_child():
    background = Background(lambda error: None)
    background.submit(lambda: None)
    background.stop()

    def child():
        assert not background.submit(lambda: None)
        background.stop()

    assert forked(child) == 0


@pytest.mark.parametrize("alone", [lambda folder: cached_library.locked(folder, "compiling-", 600), tuned_tiles._alone])
def test_a_child_does_not_keep_the_lock_of_a_file_that_its_parent_held(alone, tmp_path):
    """Such as a child that is forked while a thread compiles the core, and needs the core as well."""
    folder, held, release = tmp_path / "folder", threading.Event(), threading.Event()
    folder.mkdir(mode=0o700)

    def hold():
        with alone(folder):
            held.set()
            release.wait(SECONDS)

    def child():
        with alone(folder):
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(SECONDS)
    timer = threading.Timer(0.3, release.set)
    timer.start()
    assert forked(child) == 0
    timer.join()
    thread.join()
