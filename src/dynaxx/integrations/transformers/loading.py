# SPDX-License-Identifier: Apache-2.0
"""Load from model folders with transformers: no code of the folder runs, nothing is asked, no network is used.

Without these options, transformers asks on the terminal whether to run code of the folder, and takes "y" from a pipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def from_folder(kind: Any, folder: str | os.PathLike[str], *, refusal: str = "", **options: Any) -> Any:
    """Return `kind.from_pretrained(folder, **options)`.

    Args:
        kind: a class of transformers: an auto class, or that of a model, tokenizer or config.
        folder: a folder in Hugging Face's format, or a name in the hub's cache.
        refusal: begins the message about an unreadable folder; "FOLDER is not a model" by default.
        **options: further arguments.

    Raises:
        ValueError: transformers cannot read the folder, or only with code of the folder.
        ImportError: a package is missing.
    """
    with _readable(refusal or f"{folder} is not a model"):
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)


def from_config(kind: Any, config: Any, **options: Any) -> Any:
    """Return `kind.from_config(config, **options)`, a model with random weights; `kind` is an auto class."""
    return kind.from_config(config, trust_remote_code=False, **options)


@contextmanager
def _readable(refusal: str) -> Iterator[None]:
    """Turn any error of transformers over an unreadable folder or file into one ValueError.

    A folder may be untrusted, so other libraries may fail over its files in any way.
    """
    try:
        yield
    except (MemoryError, ImportError):  # these errors are about this machine, not about the folder
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "out of memory" in str(error).lower():
            raise
        raise ValueError(f"{refusal} that transformers can read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    return said if isinstance(error, OSError | ValueError) and said else f"{type(error).__name__}: {said}"
