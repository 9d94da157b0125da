# SPDX-License-Identifier: Apache-2.0
"""Run jobs in a daemon thread with a short queue. A job that does not fit is dropped, and `submit` returns False.

The process would abort if the interpreter exited while a thread computes in C++. Every thread is therefore joined after
its current job, by `stop()` or when the interpreter exits. Waiting jobs are dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dynaxx.forks import in_child, new_lock

Job = Callable[[], Any]
Jobs = queue.Queue[Job | None]

EXIT_SECONDS = 60.0  # longest wait for a job when the interpreter exits


class Background:
    """Run jobs one after another in a thread, which starts with the first job.

    Args:
        failed: a function that receives the exceptions of jobs; they never stop the thread.
        depth: number of jobs that may wait.

    Attributes:
        patient: whether `submit` waits for room, so that everything is recorded. Never set it in service.
    """

    patient = False

    def __init__(self, failed: Callable[[Exception], Any], depth: int = 4) -> None:
        self._failed = failed
        self._depth = depth
        self._start()
        in_child(self, Background._continue_after_fork)

    def _start(self) -> None:
        self._queue: Jobs = queue.Queue(self._depth)
        self._thread: threading.Thread | None = None
        self._starting = new_lock()
        self._finalizer = weakref.finalize(self, _end_after_this_job, self._queue)
        self._finalizer.atexit = False  # `_leave` ends the threads and joins them

    def submit(self, job: Job) -> bool:
        """Queue a job. Return False if it was dropped because the queue is full or the thread has stopped."""
        if not self._finalizer.alive:
            return False
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
        """Wait until all queued jobs are done."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.join()

    def stop(self) -> None:
        """Stop the thread after its current job, and join it. Waiting jobs are dropped."""
        self._finalizer()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _continue_after_fork(self) -> None:
        """Forget, in a forked child, the parent's thread, and its queue, whose lock that thread may hold."""
        _running.clear()
        if self._finalizer.detach() is not None:  # it was not stopped
            self._start()


_running: dict[threading.Thread, Jobs] = {}  # threads that may be running
_leaving: list[bool] = []  # not empty while the interpreter exits


def _end_after_this_job(jobs: Jobs) -> None:
    """Drop the waiting jobs and tell the thread to end."""
    while True:
        with contextlib.suppress(queue.Empty):
            while True:
                jobs.get_nowait()
                jobs.task_done()
        try:
            return jobs.put_nowait(None)
        except queue.Full:  # another thread queued a job meanwhile
            continue


@atexit.register
def _leave() -> None:
    """End all threads before the interpreter exits, and wait for their current jobs."""
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
