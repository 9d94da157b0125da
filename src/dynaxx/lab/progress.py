# SPDX-License-Identifier: Apache-2.0
"""Progress of long tools: bars on a terminal, occasional lines in a log, or nothing with --quiet.

Everything goes to stderr; stdout is for results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TextIO

from dynaxx.lab.time_budget import TimeBudget


class Task(Protocol):
    """One task in progress."""

    def advance(self, n: float = 1, note: str = "") -> None:
        """Report `n` more steps as done. `note`, if given, replaces the text beside the bar."""


class Progress(Protocol):
    """The receiver of a tool's progress. Tasks may nest."""

    def task(self, description: str, total: float | None = None) -> AbstractContextManager[Task]:
        """Begin a task of `total` steps, or of unknown length. It ends with the `with` block."""


class SilentProgress:
    """Progress that prints nothing."""

    def advance(self, n: float = 1, note: str = "") -> None:
        """Do nothing."""

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Return a task that prints nothing."""
        yield self


class LineProgress:
    """Progress for logs: a line when a task begins and ends, and every `interval` seconds between."""

    def __init__(self, file: TextIO | None = None, interval: float = 15.0) -> None:
        self._file = file or sys.stderr
        self._interval = interval

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Begin a task; print a line at its begin and at its end."""
        task = _LineTask(self._say, description, total, self._interval)
        self._say(description)
        yield task
        self._say(f"{description}: done in {clock(time.monotonic() - task.started)}{task.said()}")

    def _say(self, line: str) -> None:
        try:
            print(line, file=self._file, flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # a log on a full disk loses lines, but not the work
            pass


class _LineTask:
    def __init__(self, say: Any, description: str, total: float | None, interval: float) -> None:
        self.started = self._last = time.monotonic()
        self._say, self._description, self._total, self._interval = say, description, total, interval
        self._done = 0.0
        self._note = ""

    def said(self) -> str:
        return f" ({self._note})" if self._note else ""

    def advance(self, n: float = 1, note: str = "") -> None:
        self._done += n
        self._note = note or self._note
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last, elapsed = now, now - self.started
        left = ""
        if self._total and self._done:
            remaining = elapsed * max(0.0, self._total - self._done) / self._done
            left = f", {self._done / self._total:.0%}, about {clock(remaining)} left"
        self._say(f"{self._description}: {clock(elapsed)}{left}{self.said()}")


class BudgetProgress:
    """Progress of a command with a time budget: the outermost bar shows the budget, and inner ones no estimates.

    Without a budget, the outermost bar has no estimate, and inner ones have theirs.
    """

    def __init__(self, progress: Progress, time: TimeBudget) -> None:
        self._progress, self._time = progress, time
        self._outer: Task | None = None
        self._shown = 0.0

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Begin a task."""
        outermost = self._outer is None
        limited = self._time.seconds is not None
        if outermost:
            self._shown = self._time.spent
            total = self._time.seconds - self._shown if self._time.seconds is not None else None
        with self._progress.task(description, total if outermost or not limited else None) as task:
            if outermost:
                self._outer = task
            try:
                yield _BudgetTask(self, task)
            finally:
                if outermost:
                    self._outer = None

    def tick(self, note: str = "") -> None:
        """Advance the outermost bar to the time spent, with a note."""
        spent = min(self._time.spent, self._time.seconds or 0.0)
        if self._outer is not None:
            self._outer.advance(max(0.0, spent - self._shown), note)
        self._shown = max(self._shown, spent)


class _BudgetTask:
    def __init__(self, progress: BudgetProgress, task: Task) -> None:
        self._progress, self._task = progress, task

    def advance(self, n: float = 1, note: str = "") -> None:
        if self._task is self._progress._outer:
            self._progress.tick(note)
        else:
            self._task.advance(n, note)
            self._progress.tick()


class RichProgress:
    """Progress bars with elapsed and remaining time on a terminal, with rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        def times() -> Column:
            return Column(no_wrap=True, min_width=7, justify="right")

        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(table_column=times()),
            TextColumn("left"),
            TimeRemainingColumn(table_column=times()),
            TextColumn("[dim]{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=Console(stderr=True),
            expand=True,
        )
        self._depth = 0

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Begin a task with a bar."""
        if not self._depth:
            self._bars.start()
        task = _RichTask(self._bars, self._bars.add_task("  " * self._depth + description, total=total, note=""))
        self._depth += 1
        try:
            yield task
        finally:
            self._depth -= 1
            if self._depth:
                self._bars.remove_task(task.id)  # inner bars disappear; the outermost stays
            else:
                self._bars.stop()


class _RichTask:
    def __init__(self, bars: Any, task_id: Any) -> None:
        self._bars, self.id = bars, task_id

    def advance(self, n: float = 1, note: str = "") -> None:
        self._bars.update(self.id, advance=n, **({"note": note} if note else {}))


def make_progress(quiet: bool = False) -> Progress:
    """Return bars on a terminal if rich is installed, lines in a log, nothing if `quiet`."""
    if quiet:
        return SilentProgress()
    if sys.stderr.isatty():
        try:
            return RichProgress()
        except ImportError:
            pass
    return LineProgress()


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds: 75 gives "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
