# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from dynaxx.lab.conversations import plain_text
from dynaxx.lab.texts import load_text

ASKED = "User: Why?\n\nAssistant: Because."


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}, ASKED),
        ({"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}], "id": 3}, ASKED),
        ({"prompt": "Why?", "completion": " Because."}, "Why? Because."),
        ({"prompt": [{"role": "user", "content": "Why?"}], "completion": [
            {"role": "assistant", "content": "Because."}]}, ASKED),
        ({"prompt": "Why?", "response": "Because.", "score": 1}, "Why?\n\nBecause."),
        ({"instruction": "Answer.", "input": "", "output": "Because."}, "Answer.\n\nBecause."),
        ({"question": "Why?", "answer": "Because."}, "Why?\n\nBecause."),
        ({"instruction": "Why?", "context": "", "response": "Because."}, "Why?\n\nBecause."),
        ({"custom_id": "1", "body": {"messages": [{"role": "user", "content": "Why?"}]}}, "User: Why?"),
        ("Why?", "Why?"),
        ({"content": "Because."}, "Because."),
        ({"prompt": "Why?"}, "Why?"),
        ({"text": "Because."}, "Because."),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}, {"type": "image"}]},
                       {"role": "assistant", "content": None, "tool_calls": []},
                       {"role": "assistant", "content": "Because."}]}, ASKED),
    ],
)  # fmt: skip
def test_common_forms_are_read_without_braces(row, text, tmp_path):
    said = []
    for name, content in (
        ("a.jsonl", f"{json.dumps(row)}\n{json.dumps(row)}\n\n"),
        ("a", json.dumps([row, row], indent=1)),
    ):
        assert plain_text(content, name, said.append) == f"{text}\n\n{text}"
    assert said == [f"{name}: 2 rows of JSON are read as the text that they hold" for name in ("a.jsonl", "a")]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row))
    assert load_text(path) == text
    if isinstance(row, dict):
        assert plain_text(json.dumps(row, indent=1), "a.json", said.append) == text, "one object over several lines"


@pytest.mark.parametrize("text", ["plain words", "{ a block of code }\n{}", "", "[1, 2]", "# head\n{}"])
def test_other_text_stays_as_it_is(text):
    said = []
    assert plain_text(text, "a.txt", said.append) == text
    assert said == []


@pytest.mark.parametrize("row", [{"body": "x"}, {"messages": [{"speaker": "x"}]}, {"text": 3}, 7])
def test_unknown_forms_are_said(row):
    said, text = [], f'{{"text": "known"}}\n{json.dumps(row)}'
    assert plain_text(text, "a.txt", said.append) == text
    assert "is read as it stands, braces included" in said[0]
    assert "prompt + completion" in said[0]


@pytest.mark.parametrize("row", [{"text": None}, {"messages": None}, {"error": "x"}, 7])
def test_a_few_odd_rows_are_left_out_and_said(row, tmp_path):
    said, known = [], json.dumps({"messages": [{"role": "user", "content": ["Why?", {"type": "text", "text": None}]}]})
    text = f"\N{ZERO WIDTH NO-BREAK SPACE}{known}\n{json.dumps(row)}\n{known}"
    path = tmp_path / "a.jsonl"
    path.write_text(text, "utf-8")
    assert load_text(path, said.append) == "User: Why?\n\nUser: Why?"
    assert said[0].startswith(f"{path}: 2 rows of JSON are read as the text that they hold; 1 other")


def test_a_broken_line_is_named():
    with pytest.raises(ValueError, match=r"line 2 of a.jsonl must be JSON"):
        plain_text('{"text": "x"}\n{"text":', "a.jsonl", print)
