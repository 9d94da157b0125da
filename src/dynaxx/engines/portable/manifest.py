# SPDX-License-Identifier: Apache-2.0
"""`dynaxx.json`: the manifest in the folder of an exported model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dynaxx
from dynaxx.policy import Policy, policy_digest, save_policy
from dynaxx.printable import printable
from dynaxx.storage import parse_json, read_regular_file

MANIFEST = "dynaxx.json"
MAX_BYTES = 1 << 20


def read_manifest(folder: Path, engine: str, version: int, fields: Mapping[str, type]) -> dict[str, Any]:
    """Read and check the manifest of a folder that `dynaxx export` wrote.

    Args:
        folder: the folder.
        engine: name of the format, as for `dynaxx export --format`.
        version: newest version of the manifest that the caller understands.
        fields: fields that the caller needs, and their types.

    Raises:
        FileNotFoundError: the folder has no manifest.
        ValueError: the manifest is damaged, of another format, or of a newer version.
    """
    path, again = folder / MANIFEST, f"export the model again with dynaxx export --format {engine}"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a folder that dynaxx export --format {engine} wrote")
    try:
        found = parse_json(read_regular_file(path, MAX_BYTES))
    except ValueError as error:
        raise ValueError(f"{path} {error}: {again}") from None
    if not isinstance(found, dict) or found.get("format") != f"dynaxx.{engine}":
        own = printable(found.get("format"), most=80) if isinstance(found, dict) else "no object"
        raise ValueError(f"{path} must have the format dynaxx.{engine}, got {own}: {again}")
    for name, kind in {"version": int, **fields}.items():
        if not isinstance(found.get(name), kind) or (kind is int and isinstance(found[name], bool)):
            raise ValueError(f"`{name}` in {path} must be of type {kind.__name__}: {again}")
        if name == "version" and found[name] > version:
            raise ValueError(
                f"{path} has version {found[name]}, and this dynaxx reads up to {version}: it is from a newer dynaxx, "
                f"so upgrade dynaxx, or {again}"
            )
    return found


def write_manifest(
    folder: Path, engine: str, version: int, policy: Policy | None, packages: Sequence[Any], **fields: Any
) -> int:
    """Write the manifest of an export, and its policy if it has one; return the bytes of all files in the folder.

    Args:
        folder: the folder with the other files.
        engine: as in `read_manifest`.
        version: version of the manifest.
        policy: the policy.
        packages: modules whose versions matter.
        **fields: further fields.
    """
    if policy is not None:
        save_policy(policy, folder / "policy.json")
    document = {"format": f"dynaxx.{engine}", "version": version, **fields}
    document["policy"] = None if policy is None else policy_digest(policy)
    document["versions"] = {each.__name__: str(each.__version__) for each in (dynaxx, *packages)}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


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
