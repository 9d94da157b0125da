# SPDX-License-Identifier: Apache-2.0
"""Work beside the requests: a daemon thread with a short queue. What does not fit is dropped, and the caller knows."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Job = Callable[[], Any]


class Background:
    """Runs jobs one after the other, off the thread that hands them in. The thread starts with the first job.

    Args:
        failed: told of what a job raised; jobs never stop the thread.
        depth: jobs that may wait.

    Attributes:
        patient: whether `submit` waits for room: to record everything, never in service.
    """

    patient = False

    def __init__(self, failed: Callable[[Exception], Any], depth: int = 4) -> None:
        self._failed = failed
        self._depth = depth
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._queue: queue.Queue[Job | None] = queue.Queue(self._depth)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._queue)

    def submit(self, job: Job) -> bool:
        """Hand a job in; False if it was dropped: the queue is full, or the thread was stopped."""
        if not self._finalizer.alive:
            return False
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._start()
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=_work, args=(self._queue, self._failed), name="dynaxx-guard", daemon=True
                    )
                    self._thread.start()
        try:
            self._queue.put(job, block=self.patient)
        except queue.Full:
            return False
        return True

    def drain(self) -> None:
        """Wait until every job that was taken is done."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.join()

    def stop(self) -> None:
        """End the thread; jobs that wait may be dropped."""
        self._finalizer()


def _stop(jobs: queue.Queue[Job | None]) -> None:
    while True:
        try:
            return jobs.put_nowait(None)
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                jobs.get_nowait()
                jobs.task_done()


def _work(jobs: queue.Queue[Job | None], failed: Callable[[Exception], Any]) -> None:
    while True:
        job = jobs.get()
        try:
            if job is None:
                return
            job()
        except Exception as error:
            failed(error)
        finally:
            del job
            jobs.task_done()
