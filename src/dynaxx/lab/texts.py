# SPDX-License-Identifier: Apache-2.0
"""Read sample text, and split it so that a policy is validated on text that tuning has not seen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.conversations import plain_text
from dynaxx.lab.kinds import KINDS, prose_text, text_of
from dynaxx.storage import read_regular_file

MAX_BYTES = 256 * 1024 * 1024
pydoc_text = prose_text  # the text that the tools take by default
SHORTEST = 64  # tokens; shorter stretches tell nothing
SECTION_CHARS = 65_536  # about 16k tokens of English, so that a section contains a whole long context


class TextSplit(NamedTuple):
    """Two disjoint parts of one text."""

    calibration: str  # to analyze and tune on
    held_out: str  # to validate on


def load_text(source: str | Path, say: Callable[[str], object] = lambda line: None) -> str:
    """Read sample text.

    Args:
        source: a UTF-8 file, also of JSON lines (see `conversations.FORMS`); "pydoc" for the language documentation
            (465 kB) in every Python; another of `kinds.KINDS` ("code", "legal", "tables", "chat"); "-" for standard
            input.
        say: called with how JSON was read.

    Raises:
        ValueError: there is no such file, or it is empty or not text; the message says what to pass.
        OSError: the file is not a regular file of at most `MAX_BYTES` bytes (pass a pipe as "-"), or cannot be read.
    """
    if str(source) == "-":
        text = plain_text(_standard_input(), "standard input", say)
    elif str(source) == "pydoc":
        text = prose_text()
    elif str(source) in KINDS:
        text = text_of(str(source))
    else:
        try:
            text = plain_text(read_regular_file(source, MAX_BYTES).decode("utf-8-sig"), str(source), say)
        except (FileNotFoundError, IsADirectoryError):
            raise ValueError(
                "text source must be a UTF-8 file, 'pydoc' (comes with Python), another built-in text "
                f"({', '.join(KINDS)}) or '-' (stdin), got {str(source)!r}"
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} must be UTF-8 text: {error}") from None
    if not text.strip():
        raise ValueError(f"text from {str(source)!r} is empty; give a sample of your workload")
    return text


def _standard_input() -> str:
    """Read UTF-8 text from standard input, whatever the locale is."""
    if sys.stdin is None:
        raise ValueError("standard input is closed; pipe your sample into the command, or name a file")
    raw = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"text from '-' must be at most {MAX_BYTES:,} bytes; give a shorter sample")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"text from '-' must be UTF-8: {error}") from None


def split_text(text: str, *, section_chars: int = SECTION_CHARS) -> TextSplit:
    """Split a text into calibration and held-out text, deterministically.

    The text is cut at paragraph (or line) ends into at least three sections of about `section_chars` characters. Even
    sections are for calibration, odd ones are held out. Both parts then cover the whole text, and each section keeps
    its long-range structure.

    Raises:
        ValueError: the text is too short to split.
    """
    size = min(section_chars, -(-len(text) // 4))
    sections, start = [], 0
    while start < len(text):
        end = _paragraph_end(text, start, start + size) if len(text) - start > 1.5 * size else len(text)
        sections.append(text[start:end])
        start = end
    if len(sections) < 2:
        raise ValueError(f"text must have at least a few paragraphs to split, got {len(text)} characters")
    return TextSplit("".join(sections[::2]), "".join(sections[1::2]))


def _paragraph_end(text: str, start: int, wanted: int) -> int:
    """Return the last paragraph end (else line end, else `wanted`) in the second half of text[start:wanted]."""
    for mark in ("\n\n", "\n"):
        at = text.rfind(mark, (start + wanted) // 2, wanted)
        if at >= 0:
            return at + len(mark)
    return wanted


def start_of(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts in front of each text, such as Gemma's <bos>; often none.

    A model that was trained with them predicts worse without: Gemma 3 270M's perplexity doubles.
    """
    found: list[int] = tokenizer("")["input_ids"]
    return found


def started(tokenizer: Any, ids: Tensor) -> Tensor:
    """Return a stretch of text (1, tokens) whose first tokens are replaced by those of `start_of`."""
    return with_start(ids, start_of(tokenizer))


def with_start(ids: Tensor, start: Sequence[int]) -> Tensor:
    """Return stretches of text (texts, tokens) whose first tokens are replaced by `start`."""
    if not start:
        return ids
    ids = ids.clone()
    ids[:, : len(start)] = ids.new_tensor(start)
    return ids


def float64(values: Any) -> Tensor:
    """Return numbers as a tensor in fp64 on the CPU, whatever defaults a user has set."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text of any length, without special tokens."""
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def encode(
    tokenizer: Any,
    text: str,
    tokens: int,
    *,
    skip: int = 0,
    part: str = "text",
    most: int | None = None,
    stretches: int = 0,
) -> Tensor:
    """Return the token ids `skip` to `skip + tokens` of a text, (1, tokens) int64, without special tokens.

    With `most`, return as many as the text has, from `tokens` to `most`. With `stretches`, the text is one half of a
    sample, and the tokens are for that many stretches, which the error says.

    Raises:
        ValueError: the text is too short; the message names it by `part` and gives its length.
    """
    ids = ids_of(tokenizer, text)
    if len(ids) < skip + tokens:
        need, fix = f"{skip + tokens:,} tokens", "give more text or fewer tokens"
        if stretches:
            fits = (len(ids) - 1) // stretches // SHORTEST * SHORTEST
            need += f" (the whole text about {2 * tokens:,})"
            fix = f"give more text, or --tokens {fits}" if fits else "give more text"
        raise ValueError(f"{part} must have at least {need}, got {len(ids):,}; {fix}")
    return torch.tensor([ids[skip : skip + max(tokens, most or 0)]], dtype=torch.int64, device="cpu")


def check_tokens(model: Any, tokens: int, block_size: int) -> None:
    """Raise ValueError if samples are shorter than a block or longer than the model's positions."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
    if not block_size <= tokens <= most:
        fix = f"; give --tokens {most}" if most >= block_size else ""
        raise ValueError(
            f"`tokens` must be from block_size = {block_size} to the model's {most} positions, got {tokens}{fix}"
        )
