# SPDX-License-Identifier: Apache-2.0
"""Long-context tasks follow their definitions, have the requested length, and are the same every time."""

import contextlib
import json
import math
import random
import re
from collections import Counter

import pytest
import torch

from dynaxx.lab.tasks.counting import ZETA_2, common_words, frequent_words
from dynaxx.lab.tasks.graphs import parents, two_steps
from dynaxx.lab.tasks.haystack import NOISE, Haystack, different
from dynaxx.lab.tasks.needles import NEEDLE_TASKS
from dynaxx.lab.tasks.result import Interval, interval_of, judged, share_of
from dynaxx.lab.tasks.run import SuitePlan, run_suite
from dynaxx.lab.tasks.score import answer_task, closed_book, grade, other_answers
from dynaxx.lab.tasks.suite import DEFINITIONS, RULER, SUITES, make_task, named_tasks
from dynaxx.lab.texts import pydoc_text

NUMBER, UUID = r"[1-9]\d{6}", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
WORDS = r"[a-z]+-[a-z]+"
# RULER, arXiv 2404.06654, table 2 and its synthetic.yaml: haystack, keys, values, and how many keys, values, queries
PUBLISHED = {
    "niah_single_1": ("repeat", WORDS, NUMBER, 1, 1, 1),
    "niah_single_2": ("essay", WORDS, NUMBER, 1, 1, 1),
    "niah_single_3": ("essay", WORDS, UUID, 1, 1, 1),
    "niah_multikey_1": ("essay", WORDS, NUMBER, 4, 1, 1),
    "niah_multikey_2": ("needle", WORDS, NUMBER, 1, 1, 1),
    "niah_multikey_3": ("needle", UUID, UUID, 1, 1, 1),
    "niah_multivalue": ("essay", WORDS, NUMBER, 1, 4, 1),
    "niah_multiquery": ("essay", WORDS, NUMBER, 4, 1, 4),
}
THE_OTHERS = ("vt", "cwe", "fwe", "qa_1", "qa_2")


class Pieces:
    """A tokenizer of short runs of letters, single digits and other characters. It learns new pieces as they come."""

    def __init__(self):
        self.ids, self.pieces = {}, []

    def __call__(self, text, **_):
        found = re.findall(r" ?[A-Za-z]{1,4}|\s?.", text, flags=re.DOTALL)
        for piece in found:
            if piece not in self.ids:
                self.ids[piece] = len(self.pieces)
                self.pieces.append(piece)
        return {"input_ids": [self.ids[piece] for piece in found]}

    def decode(self, ids):
        return "".join(self.pieces[int(i)] for i in ids)


class Letters:
    """A tokenizer of single characters, 97 of them."""

    def __call__(self, text, **_):
        return {"input_ids": [(ord(letter) - 32) % 96 for letter in text]}

    def decode(self, ids):
        return "".join(chr(int(i) % 96 + 32) for i in ids)


HAYSTACK = Haystack(pydoc_text())


def made(task, tokens=1500, index=0, seed=0):
    tokenizer = Pieces()
    sample = make_task(task, tokenizer, HAYSTACK, tokens, seed=seed, index=index)
    prompt = tokenizer.decode(sample.prompt[0])
    assert prompt.endswith(tokenizer.decode(sample.question[0])), "the question ends the prompt"
    return prompt, sample.answers, tokenizer.decode(sample.answer), sample


def test_the_suite_is_rulers_thirteen():
    assert [task.name for task in RULER] == [*PUBLISHED, *THE_OTHERS]
    assert SUITES["ruler"] == (*PUBLISHED, *THE_OTHERS)
    assert set(SUITES["long"]) - set(SUITES["ruler"]) == {"rounds", "graph_parents", "graph_steps"}
    assert named_tasks(("vt", "ruler", "vt")) == ("vt", *PUBLISHED, *THE_OTHERS[1:])
    with pytest.raises(ValueError, match=r"no task 'vtt': there are niah_single_1, .* and the suites ruler, long"):
        named_tasks(("vtt",))


@pytest.mark.parametrize("task", PUBLISHED)
def test_needles_are_as_published(task):
    haystack, key, value, keys, values, queries = PUBLISHED[task]
    settings = next(each.make for each in NEEDLE_TASKS if each.name == task)
    assert (settings.haystack, settings.values, settings.queries) == (haystack, values, queries)
    assert max(settings.keys, settings.queries) == keys
    for index in range(2):
        prompt, answers, continuation, _ = made(task, index=index)
        needles = re.findall(rf"One of the secret \w+s of ({key}) is ({value})\.", prompt)
        of_key = {}
        for k, v in needles:
            of_key.setdefault(k, []).append(v)
        question = prompt[prompt.rindex("Question:") :]
        asked = re.findall(key, question.partition("\n")[0].partition(" of ")[2])
        assert len(asked) == queries
        assert len(answers) == values * queries
        assert Counter(answers) == Counter(v for k in asked for v in of_key[k]), (
            "all values of all keys that are asked for"
        )
        assert all(len(of_key[k]) == values for k in asked)
        assert continuation == " " + ", ".join(answers)
        if haystack == "needle":
            assert len(of_key) == len(needles) > 10, "all under other keys"
        else:
            assert len(of_key) == keys
            lines = prompt.splitlines()
            assert (lines.count(NOISE) > 20) == (haystack == "repeat")
        if haystack == "essay":
            assert any(sentence in prompt for sentence in HAYSTACK.sentences)


def test_depths_and_facts_differ_between_samples():
    found = [made("niah_single_2", index=index)[:2] for index in range(20)]
    assert len({answers for _, answers in found}) == 20
    depths = [prompt.index(answers[0]) / len(prompt) for prompt, answers in found]
    assert max(depths) - min(depths) > 0.3


def test_a_variable_is_tracked_over_four_hops():
    prompt, answers, continuation, _ = made("vt")
    solved, asked = prompt.split("\n\nThe text below")
    pairs = re.findall(r"VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d{5}))\n", asked)
    assert [name for name, _, _ in pairs] == list(answers)
    assert [before for _, before, _ in pairs] == ["", *answers[:-1]], "one chain, in its order"
    assert pairs[0][2] in asked[asked.rindex("Question") :]
    assert len(answers) == 5
    assert asked.count(NOISE) > 10
    assert len(re.findall(r"VAR [A-Z]{3} =", solved)) == 5, "an example comes first, with shorter names"
    assert continuation == " " + ", ".join(answers)


@pytest.mark.parametrize(("tokens", "often", "seldom"), [(1500, 6, 1), (4096, 30, 3)])
def test_common_words_are_common(tokens, often, seldom):
    example = common_words(random.Random(0), HAYSTACK, 40, tokens)
    listed = example.context[example.context.rindex("The words of") :]
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", listed))
    assert len(example.answers) == 10
    assert all(counts.pop(word) == often for word in example.answers)
    assert len(counts) == 40
    assert set(counts.values()) == {seldom}
    numbers = [int(n) for n in re.findall(r"(\d+)\. ", listed)]
    assert numbers == list(range(1, 10 * often + 40 * seldom + 1))
    assert "".join(example.pieces).startswith(" 1. ")
    assert example.context.count("The words of") == 2, "an example comes first"


def test_frequent_words_follow_zipf():
    example = frequent_words(random.Random(0), HAYSTACK, 1000, 4096)
    counts = Counter(re.findall(r"\b[a-z]{6}\b|\.\.\.", example.context.split("\n")[1]))
    ranked = counts.most_common(5)
    assert ranked[0][0] == "..."
    assert [word for word, _ in ranked[1:4]] == list(example.answers)
    assert [count for _, count in ranked] == [int(1000 / rank**2 / ZETA_2) for rank in range(1, 6)]
    assert pytest.approx(math.pi**2 / 6) == ZETA_2


def test_questions_are_answered_by_their_passages():
    prompt, (city,), _, _ = made("qa_1")
    name = re.search(r"was (.*) born\?\nAnswer:$", prompt)[1]
    assert re.search(rf"{name} was born in (\w+)", prompt)[1] == city
    assert prompt.count("was born in") == prompt.count("Passage ") > 3
    prompt, (city,), _, _ = made("qa_2")
    building = re.search(r"designer of the (.*) born\?\nAnswer:$", prompt)[1]
    designer = re.search(rf"The {re.escape(building)} was designed by (.*) and opened", prompt)[1]
    assert re.search(rf"{designer} was born in (\w+)", prompt)[1] == city, "two passages lead to it"


def test_rounds_ask_for_one_of_two_equal_requests():
    prompt, (answer,), _, _ = made("rounds")
    mark, which, form, topic = re.search(
        r"User: Write (\w{6}) and then the (first|second) (\w+) about the (\w+) again, word for word.\nAssistant: \1$",
        prompt,
    ).groups()
    assert prompt.count(mark) == 2
    replies = re.findall(rf"User: Write a {form} about the {topic}\.\nAssistant: (.*)\n", prompt)
    assert len(replies) == 2
    assert replies[("first", "second").index(which)] == answer != replies[("second", "first").index(which)]
    assert prompt.count("User:") > 10


@pytest.mark.parametrize("steps", [parents, two_steps])
def test_graphs_are_walked_right(steps):
    for seed in range(5):
        example = steps(random.Random(seed), HAYSTACK, 60, 1000)
        listed = example.context.split("\n\n")[2]
        edges = re.findall(r"([0-9a-f]{6}) -> ([0-9a-f]{6})\n", listed)
        node = re.search(r"([0-9a-f]{6})\?", example.question)[1]
        if steps is parents:
            right = {a for a, b in edges if b == node}
        else:
            near = {b for a, b in edges if a == node}
            right = {b for a, b in edges if a in near} - near - {node}
        assert set(example.answers) == right
        assert len(set(edges)) == len(edges) >= 50


@pytest.mark.parametrize("steps", [parents, two_steps])
def test_the_smallest_graphs_have_answers(steps):
    assert all(steps(random.Random(seed), HAYSTACK, 8, 1000).answers for seed in range(500))


@pytest.mark.parametrize("task", DEFINITIONS)
def test_prompts_have_the_length_that_was_asked_for_and_are_the_same_again(task):
    for tokens in (1200, 3000):
        _, _, _, sample = made(task, tokens, index=1, seed=5)
        used = sample.prompt.shape[1] + len(sample.answer)
        assert 0.75 * tokens < used <= tokens
        assert sample.ends[-1] == len(sample.answer)
        again = made(task, tokens, index=1, seed=5)[3]
        assert torch.equal(sample.prompt, again.prompt)
        assert sample.answers == again.answers
    other = made(task, 1200, index=2, seed=5)[3]
    assert not torch.equal(other.prompt[:, :50], made(task, 1200, index=1, seed=5)[3].prompt[:, :50]) or (
        other.answers != again.answers
    )


def test_tasks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"task vt needs prompts of [\d,]+ tokens at least, got 100"):
        made("vt", 100)
    with pytest.raises(ValueError, match="tasks need a text of at least 20 sentences"):
        Haystack("Too short.")
    with pytest.raises(ValueError, match="`samples` must be at least 1"):
        SuitePlan(samples=0)
    with pytest.raises(ValueError, match="no task"):
        SuitePlan(("rulers",))


def test_names_do_not_run_out():
    rng, taken = random.Random(0), set()
    names = different(rng, "words", 14_000, taken)
    assert len(set(names)) == len(names) == len(taken)


def test_grades():
    assert grade("all", " 12, 34", ("12", "34", "56")) == pytest.approx(2 / 3)
    assert grade("any", "in LIMA.", ("Lima",)) == 1
    assert grade("any", "in Oslo", ("Lima",)) == 0
    assert grade("ratio", " The lake is still.", ("The lake is still.",)) == 1
    assert grade("ratio", "A lake is still.", ("The lake is still.",)) == 0, "it begins otherwise"
    assert 0.5 < grade("ratio", "The lake was calm.", ("The lake is still.",)) < 1
    assert grade("f1", " aaaaaa, bbbbbb\ncccccc", ("aaaaaa", "cccccc")) == pytest.approx(0.5), "the first line counts"
    assert grade("f1", "", ("aaaaaa",)) == 0


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_scores_are_those_of_a_plain_computation(model):
    sample = make_task("niah_multivalue", Letters(), HAYSTACK, 900)
    found = answer_task(model, Letters(), sample)
    with torch.no_grad():
        ids = torch.cat([sample.prompt, sample.answer[None]], dim=1)
        logprobs = model(ids).logits.log_softmax(-1)[0, sample.prompt.shape[1] - 1 : -1]
        assert found.logprob == pytest.approx(float(logprobs.gather(1, sample.answer[:, None]).mean()), rel=1e-4)
        count = len(sample.answer) + 16
        written = model.generate(sample.prompt, max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        text = Letters().decode(written[0, sample.prompt.shape[1] :])
        assert found.match == grade("all", text, sample.answers)
        alone = torch.cat([sample.question, sample.answer[None]], dim=1)
        logprobs = model(alone).logits.log_softmax(-1)[0, sample.question.shape[1] - 1 : -1]
        assert closed_book(model, sample) == pytest.approx(
            float(logprobs.gather(1, sample.answer[:, None]).mean()), rel=1e-4
        )


def test_wrong_answers_are_scored_after_the_same_prompt(model):
    samples = [make_task("niah_single_1", Letters(), HAYSTACK, 900, index=i) for i in range(3)]
    others = other_answers(samples, 0)
    assert [each.tolist() for each in others] == [each.answer.tolist() for each in samples[1:]]
    assert other_answers(samples[:1], 0) == []
    assert other_answers([samples[0]] * 2, 0) == [], "the same answer is not a wrong one"
    found = answer_task(model, Letters(), samples[0], others=others)
    plain = answer_task(model, Letters(), samples[0])
    assert (found.logprob, found.match, plain.others) == (plain.logprob, plain.match, None)
    with torch.no_grad():
        each = []
        for answer in others:
            ids = torch.cat([samples[0].prompt, answer[None]], dim=1)
            logprobs = model(ids).logits.log_softmax(-1)[0, samples[0].prompt.shape[1] - 1 : -1]
            each.append(float(logprobs.gather(1, answer[:, None]).mean()))
    assert found.others == pytest.approx(sum(each) / len(each), rel=1e-4)


@pytest.mark.slow
def test_a_suite_compares_a_model_with_itself(model):
    plan = SuitePlan(("niah_single_1", "vt", "niah_multivalue"), (1000, 2200), samples=2)
    said = []
    found = run_suite(model, Letters(), contextlib.nullcontext, pydoc_text(), plan, say=lambda *x: said.append(x))
    assert sum(share for share, _ in said) == pytest.approx(1)
    assert [(row.task, row.tokens) for row in found.rows] == [
        ("niah_single_1", 1000), ("niah_multivalue", 1000), ("niah_single_1", 2200), ("vt", 2200),
        ("niah_multivalue", 2200),
    ]  # fmt: skip
    assert found.skipped[0].startswith("task vt needs prompts of")
    assert all(row.drop.mean == 0 and row.verdict == "not informative" for row in found.rows), "it knows nothing"
    assert found.passed
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["rows"][0]["drop"]["mean"] == 0
    assert "5 rows: 5 not informative" in found.summary()


def test_verdicts():
    right, wrong = (-0.1, 1.0), (-3.0, 0.0)

    def verdict(dense, sparse, known=None, limit=0.1):
        known = [-4.0] * len(dense) if known is None else known
        row = judged("vt", 1024, dense, sparse, known, limit)
        return row.verdict, row.why

    assert verdict([right] * 5, [right] * 5)[0] == "holds"
    assert verdict([right] * 5, [wrong] * 5)[0] == "fails"
    assert verdict([right] * 5, [(-0.6, 1.0), (-0.5, 1.0), (-0.6, 1.0), (-0.5, 1.0), (-0.6, 1.0)])[0] == "fails"
    said = verdict([right] * 5, [right] * 4 + [(-1.0, 1.0)])
    assert said[0] == "unclear"
    assert "more samples would tell" in said[1]
    assert verdict([wrong] * 5, [wrong] * 5, (-3.0,) * 5)[0] == "not informative"
    held = verdict([wrong] * 5, [wrong] * 5)  # not found, but the context makes it likelier by one nat
    assert held[0] == "holds"
    assert "judged by likelihood" in held[1]
    wide = [-8.0, -1.0, -3.0, -1.0, -2.0]  # of wrong answers after the same prompts: as likely as the right ones
    row = judged("vt", 1024, [wrong] * 5, [wrong] * 5, [-4.0] * 5, 0.1, others=wide)
    assert row.verdict == "not informative"
    assert "does not tell them from other prompts' answers" in row.why
    assert row.preference is not None
    assert row.preference.low < 0 < row.preference.high
    for others in ([-6.0] * 5, [None] * 5, [-2.0] + [None] * 4):  # clearly less likely; unknown; known for one alone
        assert judged("vt", 1024, [wrong] * 5, [wrong] * 5, [-4.0] * 5, 0.1, others=others).verdict == "holds"
    assert judged("vt", 1024, [right] * 5, [right] * 5, [-4.0] * 5, 0.1, others=wide).verdict == "holds", "found"
    assert verdict([right] * 5, [wrong] * 5, limit=None)[0] == "holds"
    assert verdict([right], [right])[0] == "unclear", "one sample"
    assert judged("vt", 1024, [right], [right], [-4.0], 0.1, ran_sparse=False).verdict == "dense by policy"


def test_intervals():
    assert interval_of([1.0, 2.0, 3.0]) == Interval(
        2, pytest.approx(2 - 4.303 / 3**0.5), pytest.approx(2 + 4.303 / 3**0.5)
    )
    assert interval_of([1.0]).high == math.inf
    wilson = share_of([1.0] * 10)
    assert (wilson.mean, wilson.high) == (1, 1)
    assert wilson.low == pytest.approx(0.7225, abs=1e-3)
    half = share_of([0.0, 1.0])
    assert half.low == pytest.approx(0.0945, abs=1e-3)
