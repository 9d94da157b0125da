# SPDX-License-Identifier: Apache-2.0
"""Make untrusted text safe for a terminal, a log line or a metric label."""

from __future__ import annotations

import unicodedata

# Control characters, formatting characters (bidirectional overrides among them), surrogates, unassigned and
# private code points, line and paragraph separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})


def printable(text: object, *, most: int | None = None, keep: str = "") -> str:
    r"""Return `text` with every character that a terminal could act on written as an escape, as `repr` writes it.

    Args:
        text: any object; `str` converts it if it is not a string.
        most: cut longer text to this many characters and end it with "...".
        keep: control characters to leave as they are, for example "\n" in a message of several lines.
    """
    text = text if isinstance(text, str) else str(text)
    if most is not None and len(text) > most:
        text = text[: max(0, most - 3)] + "..."
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_shown(character, keep) else _escaped(character) for character in text)


def _is_shown(character: str, keep: str) -> bool:
    return character in keep or unicodedata.category(character) not in _HIDDEN


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
