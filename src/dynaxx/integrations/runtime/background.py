# SPDX-License-Identifier: Apache-2.0
"""Work beside the requests: a daemon thread with a short queue. A job that does not fit is dropped; the caller knows.

The interpreter must not leave while a thread computes in C++: the process would abort. So every thread is joined, by
`stop()` or when the interpreter exits, after the job that it runs. Jobs that still wait are dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Job = Callable[[], Any]
Jobs = queue.Queue[Job | None]

EXIT_SECONDS = 60.0  # how long leaving the interpreter waits for a job


class Background:
    """Run jobs one after the other, off the thread that hands them in. The thread starts with the first job.

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
        self._queue: Jobs = queue.Queue(self._depth)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._finalizer = weakref.finalize(self, _end_after_this_job, self._queue)
        self._finalizer.atexit = False  # `_leave` ends threads and waits for them

    def submit(self, job: Job) -> bool:
        """Hand a job in. Return False if it was dropped: the queue is full, or the thread was stopped."""
        if not self._finalizer.alive:
            return False
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._start()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not _leaving:
                    thread = threading.Thread(
                        target=_work, args=(self._queue, self._failed), name="dynaxx-guard", daemon=True
                    )
                    _running[thread] = self._queue
                    thread.start()
                    self._thread = thread
        if _leaving:
            return False
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
        """End the thread after the job that it runs, and wait for that. Jobs that wait are dropped."""
        self._finalizer()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and os.getpid() == self._pid:
            thread.join()


_running: dict[threading.Thread, Jobs] = {}  # threads that may be at work
_leaving: list[bool] = []  # not empty while the interpreter exits


def _end_after_this_job(jobs: Jobs) -> None:
    """Drop what waits and tell the thread to end."""
    while True:
        with contextlib.suppress(queue.Empty):
            while True:
                jobs.get_nowait()
                jobs.task_done()
        try:
            return jobs.put_nowait(None)
        except queue.Full:  # somebody handed in more meanwhile
            continue


@atexit.register
def _leave() -> None:
    """End all threads before the interpreter leaves, and wait for the jobs that they run."""
    _leaving.append(True)
    threads = [(thread, jobs) for thread, jobs in list(_running.items()) if thread.is_alive()]
    for _, jobs in threads:
        _end_after_this_job(jobs)
    for thread, _ in threads:
        if thread is not threading.current_thread():
            thread.join(EXIT_SECONDS)


def _work(jobs: Jobs, failed: Callable[[Exception], Any]) -> None:
    try:
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
    finally:
        _running.pop(threading.current_thread(), None)


def _forget_threads() -> None:
    """In a forked child no thread of the parent runs."""
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
