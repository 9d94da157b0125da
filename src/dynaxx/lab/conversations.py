# SPDX-License-Identifier: Apache-2.0
"""Read chats and completions in JSON, as training sets and logs store them, as plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

ROLES = {"human": "User", "gpt": "Assistant", "bot": "Assistant", "model": "Assistant"}
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "chosen"),
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("question", "answer"),
    ("query", "response"),
)  # fields of one exchange, in order; an empty one is left out
FORMS = "messages, conversations, " + ", ".join(" + ".join(pair) for pair in PAIRS) + ", prompt, text, content"
WRAPPERS = ("body", "request")  # fields of a log that hold what was sent


def plain_text(text: str, name: str, say: Callable[[str], object]) -> str:
    """Return the text of JSON lines, or of one JSON document, in a known form; any other text as it is.

    Rows without a known form are left out if they are less than half.

    Args:
        text: the content of a file.
        name: its name, for messages. A name that ends in .jsonl or .ndjson must hold JSON lines.
        say: called with what was read, if the text is JSON.

    Raises:
        ValueError: a line of a .jsonl file is no JSON.
    """
    rows = _rows(text, name)
    if rows is None:
        return text
    read = [_said(row) for row in rows]
    odd = [row for row, said in zip(rows, read, strict=True) if said is None]
    keys = f" with the fields {', '.join(map(str, odd[0]))}" if odd and isinstance(odd[0], dict) else ""
    if 2 * len(odd) >= len(rows):
        say(f"{name}: JSON{keys} is read as it stands, braces included; forms that are read as text: {FORMS}")
        return text
    left_out = f"; {len(odd):,} other{f's{keys} are' if len(odd) > 1 else f'{keys} is'} left out" if odd else ""
    say(f"{name}: {len(rows) - len(odd):,} rows of JSON are read as the text that they hold{left_out}")
    return "\n\n".join(said for said in read if said)


def _rows(text: str, name: str) -> list[Any] | None:
    """Return the rows of JSON lines, of a JSON list, or of one object; None for other text."""
    must = name.endswith((".jsonl", ".ndjson"))
    start = text.lstrip()[:1]
    if start not in ("{", "[") and not must:
        return None
    try:
        whole = json.loads(text)
        rows = whole if isinstance(whole, list) else [whole]
        return rows if must or all(isinstance(row, (dict, str)) for row in rows) else None
    except (ValueError, RecursionError):
        pass
    rows = []
    for index, line in enumerate(text.splitlines()):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            if must:
                raise ValueError(f"line {index + 1} of {name} must be JSON: {error}") from None
            return None
    return rows


def _said(row: Any) -> str | None:
    """Return the text of a row, or None if its form is unknown."""
    if not isinstance(row, dict):
        return row if isinstance(row, str) else None
    for field in ("messages", "conversations", "conversation"):
        if isinstance(row.get(field), list):
            return _messages(row[field])
    for pair in PAIRS:
        if all(field in row for field in pair):
            return _joined((row[field] for field in pair), "" if isinstance(row.get("completion"), str) else "\n\n")
    for field in WRAPPERS:
        if isinstance(row.get(field), dict):
            return _said(row[field])
    return _joined([row[field] for field in ("prompt", "text", "content") if field in row][:1] or [None])


def _joined(parts: Iterable[Any], between: str = "\n\n") -> str | None:
    """Return parts, each a string or a list of messages, one after another."""
    said = [_messages(part) if isinstance(part, list) else part for part in parts]
    return None if not all(isinstance(part, str) for part in said) else between.join(part for part in said if part)


def _messages(messages: list[Any]) -> str | None:
    """Return a conversation as "User: ..." and "Assistant: ..."."""
    lines = []
    for message in messages:
        if not isinstance(message, dict):
            return None
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(content, list):  # parts; images and the like have no text
            texts = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "\n".join(text for text in texts if isinstance(text, str))
        if content is None and role is not None:  # a call of a tool has no text
            continue
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        lines.append(f"{ROLES.get(role, role.capitalize())}: {content}")
    return "\n\n".join(lines)
