"""How a command runs: its tool is loaded late, its result goes to stdout, what goes wrong becomes an exit code.

Exit codes: 0 done, 1 a check failed, 2 wrong use or input (the message says how to fix it), 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dynaxx.cli.options import Dtype, device_of, dtype_of

if TYPE_CHECKING:
    from dynaxx.lab.models import LoadedModel

EXTRAS = {
    "cli": ("typer", "rich", "jinja2", "matplotlib", "psutil"),
    "transformers": ("transformers", "gguf", "accelerate", "tokenizers", "safetensors"),
    "metrics": ("prometheus_client",),
    "otel": ("opentelemetry",),
    "rollout": ("openfeature",),
}


@contextlib.contextmanager
def running(
    as_json: bool, threads: int | None = None, seed: int | None = None, *, resumes: bool = False
) -> Iterator[Any]:
    """Turn what can go wrong into a message and an exit code; keep stdout for the result.

    Yields `finish(result, summary, ok=, files=)`, which the command calls last. DYNAXX_DEBUG=1 shows tracebacks.
    `resumes`: the command keeps what it did, and goes on from there.
    """
    outcome: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            _prepare(threads, seed)
            yield lambda result, summary="", ok=True, files=(): outcome.update(
                result=result, summary=summary, ok=ok, files=files
            )
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on where it was" if resumes else "stopped", err=True)
        raise typer.Exit(130) from None
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise _refusal(error, _said(error)) from None
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, typer.Exit) or "memory" not in f"{type(error).__name__}: {error}".lower():
            raise
        raise _refusal(error, f"out of memory; try shorter lengths or a smaller model ({error})") from None
    if as_json:
        result = outcome["result"]
        typer.echo(json.dumps(result if isinstance(result, dict) else result.to_dict(), allow_nan=False))
    else:
        for line in (outcome["summary"], *(f"wrote {file}" for file in outcome["files"])):
            if line:
                typer.echo(line)
    if not outcome["ok"]:
        raise typer.Exit(1)


def tool(name: str, room: str = "lab") -> Any:
    """A module of `dynaxx.lab`, or of another room, loaded when its command runs.

    Raises:
        ImportError: it needs something that is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(f"dynaxx.{room}.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if error.name == f"dynaxx.{room}.{name}":
            raise ImportError(f"this version of dynaxx has no `{name}`") from error
        extra = next((extra for extra, names in EXTRAS.items() if missing in names), "")
        fix = f"'dynaxx[{extra}]'" if extra else missing
        raise ImportError(f"`dynaxx {name.split('.')[0]}` needs {missing}: pip install {fix}") from error


def load(model: str, device: str, dtype: Dtype, progress: Any) -> LoadedModel:
    """Load the model and tokenizer that MODEL names."""
    place, models = device_of(device), tool("models")
    loaded: LoadedModel = models.load_model(model, dtype=dtype_of(dtype, place), device=place, progress=progress)
    return loaded


def read_text(source: str) -> str:
    """Read the sample that --text names."""
    text: str = tool("texts").load_text(source)
    return text


def check_targets(*paths: Path | None) -> None:
    """Before long work: refuse files that could not be written after it."""
    for path in paths:
        if path is not None:
            tool("files").check_target(path)


def progress_of(quiet: bool) -> Any:
    """Progress on stderr, or none."""
    return tool("progress").make_progress(quiet)


def command_line() -> str:
    """The command line as it was given, for the evidence."""
    return shlex.join(["dynaxx", *sys.argv[1:]])


def document_of(result: Any) -> dict[str, Any]:
    """A result as the file and stdout get it: with the command that made it."""
    return {**result.to_dict(), "command": command_line()}


def summary_of(result: Any) -> str:
    """A result's own words: a method or property `summary`, as text or as a few named values."""
    summary = getattr(result, "summary", "")
    summary = summary() if callable(summary) else summary
    if isinstance(summary, dict):
        return "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in summary.items())
    return str(summary)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def _refusal(error: BaseException, message: str) -> typer.Exit:
    """Say what is wrong and give exit code 2; under DYNAXX_DEBUG=1 raise the error itself."""
    if os.environ.get("DYNAXX_DEBUG") == "1":
        raise error
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(2)


def _prepare(threads: int | None, seed: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if seed is not None:
        torch.manual_seed(seed)
