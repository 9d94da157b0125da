"""Policy files: read with errors that say what to fix, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dynaxx.arguments import typed
from dynaxx.errors import PolicyError
from dynaxx.policy.profile import Profile
from dynaxx.policy.schema import FORMAT, VERSION, Policy, explain_errors

_NUMBER_LIST = re.compile(r"\[\n[\s\d.,eE+-]*\]")  # written on one line


@typed
def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Read and validate a policy file.

    Raises:
        FileNotFoundError: no such file.
        PolicyError: not JSON, not a dynaxx policy, of a newer version, or a wrong field; with the field and the fix.
    """
    raw = _read(path, "dynaxx tune and save_policy write one")
    try:
        return parse_policy(raw)
    except PolicyError as error:
        raise PolicyError(f"{os.fspath(path)}: {error}") from None


@typed
def parse_policy(text: str | bytes) -> Policy:
    """A policy from the text of its file. Raises `PolicyError` as `load_policy`."""
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(f"is not JSON: {error}; write it again with save_policy") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PolicyError(f"`format` must be {FORMAT!r}, got {found!r}; this is not a dynaxx policy")
    version = data.get("version")
    if isinstance(version, bool):
        raise PolicyError(f"`version` must be {VERSION}, got {version}")
    if isinstance(version, int) and version > VERSION:
        raise PolicyError(
            f"`version` must be at most {VERSION}, got {version}; a newer dynaxx wrote it: "
            "upgrade dynaxx, or write the policy again with this one"
        )
    try:
        return Policy.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise PolicyError(explain_errors(error)) from None


@typed
def policy_text(policy: Policy) -> str:
    """The text of a policy's file. Fields at their defaults are written, so that a file says everything."""
    text = json.dumps(policy.model_dump(mode="json"), indent=2)
    return (
        _NUMBER_LIST.sub(lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text) + "\n"
    )


@typed
def save_policy(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Write a policy file; a reader at any moment, even after a crash, sees the old file or the new one, whole.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    _save(policy_text(policy), Path(path))


@typed
def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a statistics file, whole or not at all as `save_policy`."""
    _save(profile.model_dump_json() + "\n", Path(path))


@typed
def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a statistics file.

    Raises:
        FileNotFoundError: no such file.
        PolicyError: not such a file, cut short, of a newer version, or wrong in a field.
    """
    try:
        return Profile.model_validate_json(_read(path, "Handle.record in the running process writes one"))
    except ValidationError as error:
        raise PolicyError(f"{os.fspath(path)}: is no dynaxx profile: {explain_errors(error)}") from None


@typed
def policy_digest(policy: Policy) -> str:
    """Twelve hex digits that tell policies apart."""
    return hashlib.blake2b(policy_text(policy).encode(), digest_size=6).hexdigest()


@typed
def rules_digest(policy: Policy) -> str:
    """The same of what changes attention: the model, the block size, the rules."""
    rules = policy.model_dump_json(include={"model", "block_size", "rules"})
    return hashlib.blake2b(rules.encode(), digest_size=6).hexdigest()


def _read(path: str | os.PathLike[str], source: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, f"no such file; {source}", os.fspath(path)) from None


def _save(text: str, target: Path) -> None:
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:  # it would name the file beside the target, of which nobody has heard
        said = f"cannot be written ({error.strerror}); give a folder that exists and is yours to write to"
        raise OSError(error.errno, said, str(target)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError):  # as when the disk is full: it would name no file, or the one beside the target
            said = f"cannot be written ({error.strerror or error}); what was there is untouched"
            raise OSError(error.errno, said, str(target)) from None
        raise
    _sync_directory(target.parent)


def _sync_directory(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:
            raise PolicyError(f"`{name}` must be given once in an object; remove one of the two")
        data[name] = value
    return data
