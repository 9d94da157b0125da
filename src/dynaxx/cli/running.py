# SPDX-License-Identifier: Apache-2.0
"""Run a command: print its result to stdout, turn errors into exit codes.

Commands import their tool when they run, so that `dynaxx --help` is quick and needs no model library.

Exit codes: 0 success, 1 a check failed, 2 wrong usage or input (the message says the fix), 3 nothing was decided,
130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from dynaxx.cli.options import Dtype, device_of, dtype_of
from dynaxx.printable import printable

if TYPE_CHECKING:
    from dynaxx.lab.models import LoadedModel
    from dynaxx.lab.progress import Progress
    from dynaxx.policy import Policy

LOADED = time.monotonic()
UNDECIDED, INTERRUPTED = 3, 130  # exit codes
EXTRAS = {
    "cli": ("typer", "rich", "jinja2", "matplotlib", "psutil"),
    "transformers": ("transformers", "gguf", "accelerate", "tokenizers", "safetensors"),
    "metrics": ("prometheus_client",),
    "otel": ("opentelemetry",),
    "rollout": ("openfeature",),
    "onnx": ("onnx", "onnxscript", "onnx_ir", "onnxruntime"),
}


class Reportable(Protocol):
    """A result of a tool."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""


def seconds_since_start() -> float:
    """Return the seconds since this process started, where the system tells; else since this module was loaded."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        since = uptime - ticks / os.sysconf("SC_CLK_TCK")
        if since >= time.monotonic() - LOADED:
            return since
    return time.monotonic() - LOADED


class Finish:
    """The function that a command calls at its end. It stores the result until the command has ended."""

    def __init__(self) -> None:
        self.result: dict[str, Any] | Reportable = {}
        self.summary, self.code = "", 0
        self.files: list[Path] = []
        self.write: Sequence[Callable[[], Path]] = ()

    def __call__(
        self,
        result: dict[str, Any] | Reportable,
        summary: str = "",
        *,
        ok: bool = True,
        code: int = 0,
        files: Sequence[Path] = (),
        write: Sequence[Callable[[], Path]] = (),
    ) -> None:
        """Store the result.

        Args:
            result: printed to stdout with --json.
            summary: printed to stdout without --json.
            ok: False sets the exit code to 1.
            code: exit code instead, if it is not 0.
            files: files that are already written.
            write: functions that write a file and return its path. They run after the result is printed, so that a
                full disk loses the file but not the result.
        """
        self.result, self.summary, self.code = result, summary, code or int(not ok)
        self.files, self.write = list(files), write

    def show(self, as_json: bool) -> None:
        """Print the result, then write and name its files."""
        if as_json:
            document = self.result if isinstance(self.result, dict) else self.result.to_dict()
            typer.echo(json.dumps(document, allow_nan=False))
        elif self.summary:
            echo(self.summary)
        sys.stdout.flush()
        with contextlib.redirect_stdout(sys.stderr):
            self.files += [write() for write in self.write]
        for file in () if as_json else self.files:
            echo(f"wrote {file}")


@contextlib.contextmanager
def running(
    as_json: bool, threads: int | None = None, seed: int | None = None, *, resumes: bool = False
) -> Iterator[Finish]:
    """Turn errors into a message and an exit code, and keep stdout for the result.

    Yields the function that the command calls at its end. DYNAXX_DEBUG=1 shows tracebacks.

    Args:
        as_json: print the result as JSON.
        threads: CPU threads; None leaves torch's setting.
        seed: seed of torch's random numbers; None leaves them unseeded.
        resumes: whether the command saves its progress and continues from it.
    """
    outcome = Finish()
    try:
        with _sigterm_as_ctrl_c():
            with contextlib.redirect_stdout(sys.stderr):
                _prepare(threads, seed)
                yield outcome
            outcome.show(as_json)
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command again to continue" if resumes else "stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise _refusal(error, _message(error)) from None
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, typer.Exit) or "memory" not in f"{type(error).__name__}: {error}".lower():
            raise
        raise _refusal(error, f"out of memory; try shorter lengths or a smaller model ({error})") from None
    if outcome.code:
        raise typer.Exit(outcome.code)


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM, by which schedulers stop a command, act as Ctrl-C, unless somebody handles it already."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def echo(text: str, *, err: bool = False) -> None:
    """Print text that may be untrusted, with every character escaped that a terminal could act on."""
    typer.echo(printable(text, keep="\n\t\N{SOFT HYPHEN}"), err=err)


def load(model: str, device: str, dtype: Dtype, progress: Progress) -> LoadedModel:
    """Load the model and tokenizer that MODEL names, and the CPU core, so that no measurement waits for a compiler."""
    from dynaxx.core.library import active_library, present_library
    from dynaxx.lab.models import load_model

    place = device_of(device)
    loaded = load_model(model, dtype=dtype_of(dtype, place), device=place, progress=progress)
    if place == "cpu" and present_library() is None:
        with progress.task("Compiling the CPU core (once)"):
            active_library()
    return loaded


def read_text(source: str) -> str:
    """Read the sample that --text names, and say on stderr how JSON was read."""
    from dynaxx.lab.texts import load_text

    return load_text(source, lambda line: echo(line, err=True))


def check_targets(*paths: Path | None) -> None:
    """Refuse files that cannot be written, before long work starts.

    Raises:
        OSError: see `dynaxx.lab.files.check_target`.
    """
    from dynaxx.lab.files import check_target

    for path in paths:
        if path is not None:
            check_target(path)


def renewed_report(folder: Path) -> list[Callable[[], Path]]:
    """Return what writes a folder's report again, if it has one, so that the page shows the results beside it."""
    from dynaxx.lab.report.run import write_report

    return [lambda: write_report(folder)] if (folder / "report.html").exists() else []


def files_of(path: Path, document: dict[str, Any]) -> list[Callable[[], Path]]:
    """Return what writes a result and the report beside it."""
    from dynaxx.lab.files import write_result

    return [lambda: write_result(path, document), *renewed_report(path.parent)]


def progress_of(quiet: bool) -> Progress:
    """Return a progress display on stderr, or a silent one."""
    from dynaxx.lab.progress import make_progress

    return make_progress(quiet)


def command_line() -> str:
    """Return the command line as it was given, for the evidence."""
    return shlex.join(["dynaxx", *sys.argv[1:]])


def document_of(result: Reportable, model: Any, text: str, policy: Policy | None = None) -> dict[str, Any]:
    """Return a result as written to files and stdout, with what it is about and the command that made it."""
    from dynaxx.lab.about import about

    return {**result.to_dict(), "about": about(model, text, policy), "command": command_line()}


def _message(error: Exception) -> str:
    missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing and missing != "dynaxx":
        extra = next((extra for extra, names in EXTRAS.items() if missing in names), "")
        fix = f"'dynaxx[{extra}]'" if extra else missing
        return f"this command needs {missing}: pip install {fix}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def _refusal(error: BaseException, message: str) -> typer.Exit:
    """Print what is wrong and return exit code 2. With DYNAXX_DEBUG=1, raise the error itself."""
    if os.environ.get("DYNAXX_DEBUG") == "1":
        raise error
    with contextlib.suppress(OSError):  # stderr may be on a full disk; the exit code says that it failed
        echo(f"error: {message}", err=True)
    return typer.Exit(2)


def _prepare(threads: int | None, seed: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if seed is not None:
        torch.manual_seed(seed)
