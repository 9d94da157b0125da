# SPDX-License-Identifier: Apache-2.0
"""Put a model's tokenizer and configs beside its export, so that the folder can be deployed alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# Names in Hugging Face's format. `config.json` tells AutoTokenizer the class, `generation_config.json` the end tokens.
FILES = (
    "config.json",
    "generation_config.json",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
)


def copy_tokenizer(source: str | os.PathLike[str] | None, target: Path) -> None:
    """Copy the files of a tokenizer and the configs of a model folder, byte by byte; None copies nothing.

    Raises:
        ValueError: `source` has none of these files.
        OSError: a file cannot be read or written.
    """
    if source is None:
        return
    files = {file.name: file for name in FILES for file in Path(source).glob(name) if file.is_file()}
    if not files:
        raise ValueError(f"`tokenizer` must be a folder that save_pretrained wrote, got {source}")
    for name, file in files.items():
        shutil.copyfile(file, target / name)
