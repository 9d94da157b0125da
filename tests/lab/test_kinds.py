# SPDX-License-Identifier: Apache-2.0
"""Each kind of text is available, long enough, of its kind, and the same every time."""

import re

import pytest

from dynaxx.lab import kinds
from dynaxx.lab.kinds import KINDS, digest_of, kinds_of, label, text_of
from dynaxx.lab.texts import load_text, split_text


def test_every_kind_is_long_enough_and_repeatable():
    digests = set()
    for kind in KINDS:
        text = text_of(kind)
        assert len(text) > 100_000, kind
        assert load_text(kind) == text
        digests.add(digest_of(text))
        text_of.cache_clear()
        assert text_of(kind) == text, "the same again"
        calibration, held_out = split_text(text)
        assert min(len(calibration), len(held_out)) > 40_000, kind
    assert len(digests) == len(KINDS)
    assert load_text("prose") == load_text("pydoc")


def test_each_is_of_its_kind():
    count = lambda pattern, kind: len(re.findall(pattern, text_of(kind), flags=re.MULTILINE)) / len(text_of(kind))
    assert count(r"^\s*(def|class|return|if) ", "code") > 5 * count(r"^\s*(def|class|return|if) ", "legal")
    assert count(r"(?i)licen[cs]e", "legal") > 10 * count(r"(?i)licen[cs]e", "code")
    assert count(r"^(User|Assistant): ", "chat") > 10 * count(r"^(User|Assistant): ", "prose")
    assert count(r"\d", "tables") > 3 * count(r"\d", "prose")
    assert any(line.startswith("| ") for line in text_of("tables").splitlines())


def test_licences_come_once():
    paragraphs = [re.sub(r"\W+", "", each).lower() for each in re.split(r"\n\s*\n", text_of("legal"))]
    paragraphs = [each for each in paragraphs if len(each) > 40]
    assert len(set(paragraphs)) == len(paragraphs)


def test_names():
    assert kinds_of(("all", "code")) == tuple(KINDS)
    assert kinds_of(("code", "legal", "code")) == ("code", "legal")
    assert label("legal") == "licence texts"
    assert label("mine.txt") == "mine.txt"
    with pytest.raises(
        ValueError, match="no kind of text 'poems': there are prose, code, legal, tables, chat, and 'all'"
    ):
        kinds_of(("poems",))
    with pytest.raises(ValueError, match="no kind of text"):
        text_of("poems")


def test_an_installation_without_a_kind_is_told_so(monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "legal", ("licence texts", lambda: "Too short."))
    text_of.cache_clear()
    with pytest.raises(ValueError, match="only 10 characters of licence texts: use a file instead"):
        text_of("legal")
    text_of.cache_clear()
