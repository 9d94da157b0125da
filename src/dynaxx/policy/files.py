# SPDX-License-Identifier: Apache-2.0
"""Read and write policy files. Errors say the fix, and files are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dynaxx.arguments import typed
from dynaxx.errors import PolicyError
from dynaxx.policy.document import Document
from dynaxx.policy.explaining import explain_errors
from dynaxx.policy.profile import FORMAT as PROFILE_FORMAT
from dynaxx.policy.profile import Profile
from dynaxx.policy.schema import FORMAT, VERSION, Policy
from dynaxx.printable import printable
from dynaxx.storage import parse_json, read_regular_file, write_whole_file

logger = logging.getLogger("dynaxx")

MAX_BYTES = 16 * 1024 * 1024  # the reference of 126 layers with 128 heads each takes 6 MiB
D = TypeVar("D", bound=Document)
OTHER_FORMATS = {
    FORMAT: "read it with dynaxx.load_policy",
    "dynaxx.video": "it is for a diffusion transformer; read it with dynaxx.video.load_policy",
}
MAX_OBJECTS = 1 << 14  # objects in the JSON text; that many take a second or two to check

_NUMBER_LIST = re.compile(r"\[\n[\s\d.,eE+-]*\]")  # written on one line


@typed
def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Read and validate a policy file.

    Raises:
        FileNotFoundError: no such file.
        OSError: the path is not a regular file of at most `MAX_BYTES` bytes, or it cannot be read.
        PolicyError: the content is not JSON, is not a dynaxx policy, has a newer version, or has an invalid field. The
            message names the field and the fix.
    """
    return load_document(path, Policy)


def load_document(path: str | os.PathLike[str], kind: type[D]) -> D:
    """Read and validate the file of a policy of some kind, as `load_policy` does."""
    raw = _read(path, "dynaxx tune and save_policy write one")
    try:
        return _parsed(raw, kind)
    except PolicyError as error:
        raise PolicyError(f"{printable(os.fspath(path))}: {error}") from None


@typed
def parse_policy(text: str | bytes) -> Policy:
    """Return the policy from the text of its file.

    Raises:
        PolicyError: the text is not a valid policy, see `load_policy`.
    """
    return _parsed(text, Policy)


def _parsed(text: str | bytes, kind: type[D]) -> D:
    if len(text) > MAX_BYTES:
        raise PolicyError(f"must be at most {MAX_BYTES:,} bytes, got {len(text):,}; this is not a dynaxx policy")
    try:
        data = parse_json(text, most_objects=MAX_OBJECTS, unique=True, finite=False)
    except ValueError as error:
        raise PolicyError(f"{error}; write the file again with save_policy") from None
    wanted = kind.model_fields["format"].default
    if not isinstance(data, dict) or data.get("format") != wanted:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        fix = OTHER_FORMATS.get(str(found), "this is not a dynaxx policy")
        raise PolicyError(f"`format` must be {wanted!r}, got {printable(repr(found), most=80)}; {fix}")
    version = data.get("version")
    if isinstance(version, bool):
        raise PolicyError(f"`version` must be {VERSION}, got {version}")
    if isinstance(version, int) and version > VERSION:
        raise PolicyError(
            f"`version` must be at most {VERSION}, got {printable(version, most=20)}; a newer dynaxx wrote it: "
            "upgrade dynaxx, or write the policy again with this one"
        )
    _drop_sharing(data)
    data = _without_first_stages(data)
    try:
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise PolicyError(explain_errors(error)) from None


def _drop_sharing(data: dict[str, Any]) -> None:
    """Drop what a policy of 0.1 says about selections that layers share; each layer has rules of its own."""
    reuse, shared = data.get("reuse", 1), data.get("shared", [])
    if (type(reuse) is int and reuse > 1) or (isinstance(shared, list) and shared):
        logger.warning("the policy's `reuse` and `shared` are ignored: each layer selects its own blocks")
        data.pop("reuse", None)
        data.pop("shared", None)


def _without_first_stages(data: Any) -> Any:
    """Replace each scorer `two_stage` of 0.1 by its second stage, which is faster alone and misses no block."""
    if isinstance(data, list):
        return [_without_first_stages(each) for each in data]
    if not isinstance(data, dict):
        return data
    if data.get("kind") == "two_stage":
        logger.warning("the policy's `two_stage` scorers are replaced by their second stage")
        return data.get("fine", {"kind": "mean_query"})
    return {name: _without_first_stages(each) for name, each in data.items()}


@typed
def policy_text(policy: Document) -> str:
    """Return the text of a policy's file. It contains every field, including those with default values."""
    text = json.dumps(policy.model_dump(mode="json"), indent=2)
    return _NUMBER_LIST.sub(_on_one_line, text) + "\n"


@typed
def save_policy(policy: Document, path: str | os.PathLike[str]) -> None:
    """Write a policy file. Readers always see either the whole old file or the whole new one, even after a crash.

    Raises:
        OSError: the file cannot be written; the old file is untouched.
    """
    _save(policy_text(policy), path)


@typed
def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a statistics file, whole or not at all, like `save_policy`.

    Raises:
        OSError: the file cannot be written; the old file is untouched.
    """
    _save(profile.model_dump_json() + "\n", path)


@typed
def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a statistics file.

    Raises:
        FileNotFoundError: no such file.
        OSError: the path is not a regular file of at most `MAX_BYTES` bytes, or it cannot be read.
        PolicyError: the content is not a statistics file, is truncated, has a newer version, or has an invalid field.
    """
    raw = _read(path, "Handle.record in the running process writes one")
    try:
        data = parse_json(raw, most_objects=MAX_OBJECTS, unique=True, finite=False)
        found = data.get("format", PROFILE_FORMAT) if isinstance(data, dict) else type(data).__name__
        if found != PROFILE_FORMAT:
            raise ValueError(f"`format` must be {PROFILE_FORMAT!r}, got {printable(repr(found), most=80)}")
        return Profile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        message = explain_errors(error)
    except ValueError as error:
        message = str(error)
    raise PolicyError(f"{printable(os.fspath(path))}: is not a file of statistics (`Handle.record`): {message}")


@typed
def policy_digest(policy: Policy) -> str:
    """Return twelve hex digits that identify a policy."""
    return hashlib.blake2b(policy_text(policy).encode(), digest_size=6).hexdigest()


@typed
def rules_digest(policy: Policy) -> str:
    """Return twelve hex digits that identify the parts that change attention: model, block size, rules."""
    rules = policy.model_dump_json(include={"model", "block_size", "rules"})
    return hashlib.blake2b(rules.encode(), digest_size=6).hexdigest()


def _on_one_line(found: re.Match[str]) -> str:
    return re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]")


def _read(path: str | os.PathLike[str], source: str) -> bytes:
    try:
        return read_regular_file(path, MAX_BYTES)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, f"no such file; {source}", os.fspath(path)) from None


def _save(text: str, path: str | os.PathLike[str]) -> None:
    target = Path(path)
    try:
        write_whole_file(target, lambda file: file.write(text.encode()))
    except OSError as error:
        if error.errno is None:
            raise
        fix = "the old file is untouched" if target.parent.is_dir() else "give a folder that exists"
        raise OSError(error.errno, f"cannot be written ({error.strerror}); {fix}", str(target)) from None
