# SPDX-License-Identifier: Apache-2.0
"""Options that commands share, and functions that read their values."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    import torch


MAX_IN_A_RANGE = 10_000  # more layers or heads than any model has
MAX_DIGITS = 12


class Dtype(StrEnum):
    """The dtype that a model computes in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder in Hugging Face's format, a .gguf file, or smollm2, gemma3-270m."),
]
TextOption = Annotated[
    str,
    typer.Option(
        "--text",
        metavar="FILE",
        help="Sample of the workload: a text file, JSON lines of chats or completions, '-' for stdin, or built-in: "
        "pydoc, code, legal, tables, chat.",
    ),
]
KindsOption = Annotated[
    str,
    typer.Option(
        "--kinds",
        metavar="NAME,NAME,...",
        help="Built-in kinds of text beside the sample: prose, code, legal, tables, chat, or all.",
    ),
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the results.")]
LengthsOption = Annotated[str, typer.Option("--lengths", metavar="N,N,...", help="Prompt lengths in tokens.")]
BlockSizeOption = Annotated[int, typer.Option("--block-size", help="Tokens per block: 16, 32, 64 or 128.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of all random numbers.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="auto: bfloat16 on a GPU, float32 on a CPU.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads; all cores by default.")
]


def device_of(device: str, option: str = "--device") -> str:
    """Resolve "auto", and refuse a missing device before anything is loaded."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"{option} must be auto, cpu or cuda, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{option} {device} needs a GPU that torch can use; torch {torch.__version__} sees none")
    return device


def dtype_of(dtype: Dtype, device: str) -> torch.dtype:
    """Return torch's dtype, with "auto" resolved for the device."""
    import torch

    if dtype is Dtype.auto:
        return torch.float32 if device == "cpu" else torch.bfloat16
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse a list of numbers: "0,4-6" gives (0, 4, 5, 6), "" gives ()."""
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        if not _is_number(first) or (last and not _is_number(last)) or int(last or 0) > int(first) + MAX_IN_A_RANGE:
            raise ValueError(f"{option} must be numbers and ranges like 0,4-6, got {text!r}")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def block_size_of(option: str, text: str) -> int | tuple[int, int] | None:
    """Parse a block size: "32" gives 32, "64x32" gives (64, 32), "" gives None."""
    parts = text.lower().split("x") if text else []
    if len(parts) > 2 or not all(_is_number(part) for part in parts):
        raise ValueError(f"{option} must be a number of tokens like 32, or queries x keys like 64x32, got {text!r}")
    found = tuple(int(part) for part in parts)
    return None if not found else found[0] if len(found) == 1 else (found[0], found[1])


def names(text: str) -> tuple[str, ...]:
    """Return the names of a list: "a, b" is ("a", "b"), "" is ()."""
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def seconds(option: str, text: str) -> float | None:
    """Parse a time such as "90", "90s", "10m" or "2h" to seconds. "" gives None."""
    if not text:
        return None
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text[-1] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{option} must be a time like 90, 10m or 2h, got {text!r}")
    return seconds


def with_short_help(main: Collection[str]) -> type[TyperCommand]:
    """Return a class of commands whose `--help` shows only the options with these names of parameters.

    The command needs a parameter of type `HelpAllOption`.
    """

    class ShortHelp(TyperCommand):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _hide_options(self, shown=(*main, "help_all"))
            self.epilog = "More options with --help-all."

    return ShortHelp


def _hide_options(command: Any, shown: Collection[str] | None) -> None:
    """Hide the options that are not shown; None shows all."""
    for each in command.params:
        if each.param_type_name == "option":
            each.hidden = shown is not None and each.name not in shown


def _show_all(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        _hide_options(context.command, shown=None)
        context.command.epilog = None
        typer.echo(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options and exit.")
]
