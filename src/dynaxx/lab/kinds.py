# SPDX-License-Identifier: Apache-2.0
"""Five kinds of real text from Python and its installed packages: prose, code, legal text, tables and chat.

A policy that was tuned on one kind of text may lose more on another. Nothing is downloaded. Prose and code are Python's
documentation and modules, legal text is the licences of installed packages and of the system, and tables and chat are
generated from Python's data and documentation. The texts differ between environments, so results contain the digest of
each.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

MAX_CHARS = 480_000  # characters of one kind, about 120,000 tokens
MIN_CHARS = 20_000
_CODE = """
    argparse ast asyncio/base_events asyncio/streams bdb calendar cgitb codecs collections/__init__ configparser
    contextlib copy csv dataclasses datetime decimal difflib doctest email/message enum fractions ftplib functools
    gettext gzip heapq http/client imaplib inspect ipaddress json/encoder logging/__init__ mailbox mimetypes
"""
COMMON_LICENCES = Path("/usr/share/common-licenses")  # of Debian and its descendants
CODE = tuple(_CODE.split())
_DOCUMENTED = """
    subprocess _pyio tempfile threading typing unittest/case urllib/request tarfile zipfile string statistics shutil
    smtplib selectors random queue platform pickle pathlib os optparse operator numbers locale glob dis cmd bisect
    _pydecimal turtle unittest/mock
"""
DOCUMENTED = tuple(_DOCUMENTED.split())
ASKED = (
    "What does {0} do?",
    "I came across {0} and do not understand it. Can you explain?",
    "How do I use {0}?",
    "Could you tell me about {0}, please?",
)
FOLLOWED = ("Thanks. And {0}?", "That helps. Now what about {0}?", "Good to know. Where would I need {0}?")


def prose_text() -> str:
    """Return the topics of Python's `help()` in order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def code_text() -> str:
    """Return the source of modules of the standard library."""
    return "\n\n".join(source for _, source in _sources(CODE))


def legal_text() -> str:
    """Return the licences of Python, of installed packages and of the system without repeated paragraphs."""
    site = Path(sysconfig.get_path("purelib"))
    files = [Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"]
    files += sorted(
        path for path in site.glob("*.dist-info/**/*") if re.match(r"(?i)(licen[cs]e|copying|notice)", path.name)
    )
    files += sorted(COMMON_LICENCES.glob("*"))
    seen: set[str] = set()
    kept: list[str] = []
    for path in files:
        for paragraph in re.split(r"\n\s*\n", _read(path)):
            digest = re.sub(r"\W+", "", paragraph).lower()
            if len(digest) > 40 and digest not in seen:
                seen.add(digest)
                kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)


def tables_text() -> str:
    """Return tables as CSV, Markdown and aligned columns: characters, media types, time, source files."""
    tables = [*_character_tables(), *_media_tables(), *_module_tables(), *_calendar_tables()]
    order = sorted(range(len(tables)), key=lambda i: hashlib.sha256(str(i).encode()).digest())  # mixes the formats
    return "\n\n".join(tables[i] for i in order)


def chat_text() -> str:
    """Return conversations about Python's modules; the answers are their documentation."""
    turns: list[str] = []
    size = 0
    for module, source in _sources(DOCUMENTED):
        if size > MAX_CHARS:
            break
        for index, (name, said) in enumerate(_documented(source)):
            form = (FOLLOWED if index else ASKED)[len(turns) % len(FOLLOWED if index else ASKED)]
            turns.append(f"User: {form.format(f'{module}.{name}')}\n\nAssistant: {said}")
            size += len(turns[-1])
    return "\n\n".join(turns)


KINDS: dict[str, tuple[str, Callable[[], str]]] = {
    "prose": ("prose, Python's documentation", prose_text),
    "code": ("Python source code", code_text),
    "legal": ("licence texts", legal_text),
    "tables": ("tables", tables_text),
    "chat": ("conversations", chat_text),
}


@functools.cache
def text_of(kind: str) -> str:
    """Return the text of a kind, at most `MAX_CHARS` of it.

    Raises:
        ValueError: the kind is unknown, or the installation has too little text of it.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind of text {kind!r}: there are {', '.join(KINDS)}")
    text = KINDS[kind][1]()[: None if kind == "prose" else MAX_CHARS]
    if len(text) < MIN_CHARS:
        raise ValueError(f"this installation has only {len(text):,} characters of {label(kind)}: use a file instead")
    return text


def label(kind: str) -> str:
    """Return the readable name of a kind, or the name itself for a file."""
    return KINDS[kind][0] if kind in KINDS else kind


def kinds_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds with these names without duplicates, or all kinds for "all".

    Raises:
        ValueError: a kind is unknown.
    """
    found: dict[str, None] = {}
    for name in names:
        if name != "all" and name not in KINDS:
            raise ValueError(f"no kind of text {name!r}: there are {', '.join(KINDS)}, and 'all'")
        found |= dict.fromkeys(KINDS if name == "all" else (name,))
    return tuple(found)


def digest_of(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _sources(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the source of each module that this Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    for name in names:
        if source := _read(folder / f"{name}.py"):
            yield name.removesuffix("/__init__").replace("/", "."), source


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""
    except OSError:
        return ""


def _documented(source: str) -> Iterator[tuple[str, str]]:
    """Return names and docstrings of a module's functions and classes, excluding docstrings of one line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said and said.count("\n") >= 2:
                yield node.name, said


def _table(form: int, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV, as Markdown or as aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    if form % 3 == 0:
        return "\n".join(",".join(row) for row in (head, *cells))
    if form % 3 == 1:
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    return "\n".join(line(row) for row in (head, *cells))


def _character_tables() -> Iterator[str]:
    import unicodedata

    names = [(c, unicodedata.name(chr(c), "")) for c in range(0x00A1, 0x0600)]
    rows = [(f"U+{c:04X}", unicodedata.category(chr(c)), name.title(), unicodedata.bidirectional(chr(c)))
            for c, name in names if name]  # fmt: skip
    for index, start in enumerate(range(0, len(rows), 40)):
        yield _table(index, ("code", "category", "name", "direction"), rows[start : start + 40])


def _media_tables() -> Iterator[str]:
    import html.entities
    import locale
    import mimetypes

    types = sorted(mimetypes.MimeTypes().types_map[True].items())
    entities = [(name, f"U+{code:04X}", code) for name, code in sorted(html.entities.name2codepoint.items())]
    locales = [(name, *full.partition(".")[::2]) for name, full in sorted(locale.locale_alias.items())]
    for head, rows in (
        (("extension", "media type"), types),
        (("entity", "code", "number"), entities),
        (("alias", "locale", "encoding"), locales),
    ):
        for index, start in enumerate(range(0, len(rows), 50)):
            yield _table(index, head, rows[start : start + 50])


def _module_tables() -> Iterator[str]:
    rows: list[tuple[object, ...]] = []
    for name, source in _sources(CODE):
        lines = source.splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith(("def ", "class "))]
        for start, end in pairwise([*starts, len(lines)]):
            body = [len(line) for line in lines[start:end]]
            kind, defined = re.split(r"[ (:]", lines[start])[:2]
            rows.append((name, kind, defined, start + 1, len(body), max(body), f"{sum(body) / len(body):.1f}"))
    head = ("module", "kind", "name", "line", "lines", "longest", "mean length")
    for index, start in enumerate(range(0, len(rows), 40)):
        yield _table(index, head, rows[start : start + 40])


def _calendar_tables() -> Iterator[str]:
    import calendar
    import datetime

    for index, year in enumerate(range(1996, 2036)):
        rows = []
        for month in range(1, 13):
            first, days = calendar.monthrange(year, month)
            week = datetime.date(year, month, 1).isocalendar().week
            rows.append((year, calendar.month_name[month], days, calendar.day_name[first], week, calendar.isleap(year)))
        yield _table(index, ("year", "month", "days", "first day", "week", "leap"), rows)
