# SPDX-License-Identifier: Apache-2.0
"""Texts and prompts begin with the tokens that a tokenizer puts in front of a text."""

import torch

from dynaxx.lab.kinds import prose_text
from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.suite import make_task
from dynaxx.lab.texts import encode, start_of, started
from dynaxx.lab.tune.density.search_texts import search_texts
from dynaxx.lab.validate.comparison import Comparison
from dynaxx.lab.validate.tasks import make_samples

TEXT = "".join(f"Line {i} of a text that is about {i * 7 % 13}.\n\n" for i in range(2000))
START = 7


class Tokenizer:
    """One token per character, after a start token unless it is asked for none."""

    def __init__(self, start=(START,)):
        self.start = list(start)

    def __call__(self, text, add_special_tokens=True, **_):
        return {"input_ids": (self.start if add_special_tokens else []) + [ord(each) % 251 + 8 for each in text]}


def test_a_stretch_keeps_its_length():
    ids = encode(Tokenizer(), TEXT, 20)
    assert start_of(Tokenizer()) == [START]
    assert started(Tokenizer(), ids).tolist() == [[START, *ids[0, 1:].tolist()]]
    assert started(Tokenizer(()), ids) is ids
    assert ids[0, 0] != START


def test_every_text_to_tune_on_begins_with_it():
    found = search_texts(Tokenizer(), TEXT, {}, 64)
    more = search_texts(Tokenizer(), TEXT, {"code": TEXT}, 64)
    for each in (*found.costs, *found.search, *more.costs, *more.search):
        assert each.ids.shape == (1, 65)
        assert each.ids[0].tolist().count(START) == 1
        assert each.ids[0, 0] == START


def test_prompts_begin_with_it():
    haystack = encode(Tokenizer(), TEXT, 4000)[0].tolist()
    for sample in make_samples(Tokenizer(), haystack, 900, 1):
        assert sample.prompt.shape == (1, 900)
        assert sample.prompt[0, 0] == START
    sample = make_task("niah_single_1", Tokenizer(), Haystack(prose_text()), 3000)
    assert sample.prompt[0, 0] == sample.question[0, 0] == START
    assert sample.prompt.shape[1] + len(sample.answer) < 3000
    before = make_task("niah_single_1", Tokenizer(()), Haystack(prose_text()), 3000)
    assert torch.equal(before.answer, sample.answer)


def test_stretches_to_validate_on_begin_with_it():
    run = Comparison(None, None, None, [START])
    assert [each.tolist() for each in run.stretches([*range(10, 17)], 3, 3)] == [[[START, 11, 12]], [[START, 15, 16]]]
    assert [each.tolist() for each in Comparison(None, None, None).stretches([10, 11, 12], 2, 2)] == [[[10, 11]]]
