# SPDX-License-Identifier: Apache-2.0
"""Background work is dropped when its queue is full, and joined before the process exits."""

import subprocess
import sys
import threading

import pytest

from dynaxx.integrations.runtime.background import Background

LEAVES_WHILE_A_JOB_RUNS = """
import sys, threading, torch
from dynaxx.integrations.runtime.background import Background
begun = threading.Event()
def job():
    begun.set()
    x = torch.randn(500, 500)
    for _ in range(30):
        x = torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3)[0, 0]
    sys.stdout.write("done")
    sys.stdout.flush()
background = Background(failed=print)
assert background.submit(job)
for _ in range(3):
    background.submit(lambda: sys.stdout.write("dropped jobs must not run"))
begun.wait()
if sys.argv[1] == "collected":
    del background
"""


@pytest.mark.parametrize("how", ["alive", "collected"])
def test_leaving_the_interpreter_waits_for_the_job_that_runs(how):
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_WHILE_A_JOB_RUNS, how], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done", "")


def test_stop_drops_what_waits_and_joins():
    begun, goes_on, ran = threading.Event(), threading.Event(), []
    background = Background(failed=ran.append, depth=2)

    def job():
        begun.set()
        goes_on.wait(30)
        ran.append("first")

    assert background.submit(job)
    begun.wait(30)
    assert background.submit(lambda: ran.append("second"))
    threading.Timer(0.1, goes_on.set).start()
    background.stop()
    assert ran == ["first"]
    assert not background.submit(lambda: ran.append("third"))
    background.drain()


def test_a_job_may_stop_its_own_thread():
    ended = threading.Event()
    background = Background(failed=lambda error: None)
    background.submit(lambda: (background.stop(), ended.set()))
    assert ended.wait(30)
