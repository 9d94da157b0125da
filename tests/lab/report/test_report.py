# SPDX-License-Identifier: Apache-2.0
import base64
import json
import re
import shutil
import struct
import subprocess
import sys
import zlib
from html import escape
from html.parser import HTMLParser
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

import dynaxx as dx
import report_documents as made
from dynaxx.lab.report import charts
from dynaxx.lab.report import svg as pictures
from dynaxx.lab.report.charts import Axes, ChartLine, Line, Point
from dynaxx.lab.report.run import mismatches, write_report
from dynaxx.lab.report.sections import tuning_section
from dynaxx.lab.report.svg import CHAR, pattern_pictures
from dynaxx.lab.report.verdict import change, percent, times, verdict
from report_documents import DOCUMENTS, write_documents

X = "\N{MULTIPLICATION SIGN}"
VOID = {"meta", "img", "link", "br", "hr", "input"}
SMALL = made.analysis(layers=3, heads=4, size=16)
SUBSETS = [names for count in range(len(DOCUMENTS) + 1) for names in combinations(DOCUMENTS, count)]


class Page(HTMLParser):
    """Check that tags nest, and collect the elements that a test asks for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words, self.raw = [], [], [], text
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(set(names)) == len(names), f"<{tag}> names an attribute twice: {names}"
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def report(folder, *args, **kwargs):
    return Page(write_report(write_documents(folder, *args, **kwargs)).read_text())


@pytest.fixture
def full(tmp_path):
    return report(tmp_path / "run", analysis=SMALL)


@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "nothing")
def test_any_subset_of_results_makes_a_whole_page(tmp_path, names):
    page = report(tmp_path / "run", names, analysis=SMALL)
    for name, command in (("profile", "dynaxx profile"), ("analysis", "dynaxx analyze"), ("tuning", "dynaxx tune")):
        assert command in page.text, f"{name}: the command that makes it, or made it, is missing"
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [attributes["href"] for attributes in page.all("a")]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    missing = [attributes for attributes in page.all("p") if attributes.get("class") == "missing"]
    assert bool(missing) == (set(names) != set(DOCUMENTS))
    assert "notice" not in {attributes.get("class") for attributes in page.all("p")}, "these results belong together"


def test_the_page_needs_no_network_and_runs_nothing(full):
    assert full.all("script") == []
    assert full.all("link") == []
    for tag, attributes in full.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert value.startswith(("#", "data:image/png;base64,")), f"<{tag} {name}={value[:60]!r}>"
    assert "url(http" not in full.raw
    assert "@import" not in full.raw
    assert "//cdn" not in full.raw
    policy = next(each for each in full.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy["content"]


def test_charts_are_well_formed_and_described(full):
    drawn = re.findall(r"<svg.*?</svg>", full.raw, flags=re.DOTALL)
    assert len(drawn) == 7
    for svg in drawn[1:]:
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert "nan" not in svg
        assert "inf" not in svg.replace("info", "")
    images = full.all("img")
    assert len(images) == 12
    assert all(image["alt"] for image in images)


def plain(text):
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_the_verdict_says_yes_with_its_figures(full):
    assert "Yes: 22.3 % of the attention is enough at 4,096 tokens." in plain(full.text)
    assert (
        "SmolLM2-135M-Instruct: 22.3 % of the attention blocks are visited at 4,096 tokens; perplexity +0.60 % (limit "
        "+1.00 %) on held-out text of the sample. A prefill of 8,192 tokens runs at 1.60 times the speed of dense "
        "(1.55 to 1.65 measured)." in plain(full.text)
    )
    assert "reaches 21.0 % density there; one budget for all heads passes at 33.0 %" in plain(full.text)


DENSE = made.policy(False)
OUTCOMES = {
    "passed": dict(validation=made.validation()),
    "failed": dict(validation=made.validation(passed=False)),
    "slow": dict(validation=made.validation(speedup=0.8)),
    "one pair of runs": dict(validation=made.validation(spread=0.0, pairs=1)),
    "unclear": dict(validation=made.validation(speedup=1.02, spread=0.2)),
    "timed in part": dict(validation=made.validation(whole=False)),
    "not timed": dict(validation=made.validation(whole=False) | {"speed": []}),
    "with windows": dict(validation=made.validation() | {"layer_calls": {"own_pattern_calls": 5}}),
    "not validated": dict(validation=None),
    "not done": dict(validation=None, tuning=made.tuning("sparse", "time")),
    "undecided": dict(validation=None, tuning=made.tuning("undecided", "time"), policy=DENSE),
    "interrupted": dict(validation=None, tuning=made.tuning("undecided", "interrupted"), policy=DENSE),
    "dense": dict(validation=None, tuning=made.tuning("dense"), policy=DENSE),
    "no reference": dict(tuning=made.tuning() | {"reference": "none: no time was left"}),
    "stale validation": dict(validation=made.validation(of=DENSE)),
    "stale tuning": dict(tuning=made.tuning(of=DENSE), validation=None),
    "old version": {name: {**make(), "about": None} for name, make in DOCUMENTS.items() if name != "policy"},
}


def page_of(folder, **documents):
    """Return the page of documents, without those that are None."""
    given = {"analysis": SMALL} | documents
    return report(folder, [name for name in DOCUMENTS if given.get(name, True)], **given)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_sentences_repeat_what_the_documents_say(tmp_path, outcome):
    documents = {name: make() for name, make in DOCUMENTS.items()} | {"analysis": SMALL} | OUTCOMES[outcome]
    said = plain(page_of(tmp_path, **documents).text)
    top = said[: said.index("Where the time goes")]
    stale = mismatches({name: document for name, document in documents.items() if document})
    assert all(problem in top for problem in stale.values())
    tuning, validation = (None if name in stale else documents[name] for name in ("tuning", "validation"))
    policy, verdict = documents["policy"], tuning["verdict"] if tuning else ""
    assert ("Passed" in top) == bool(validation and validation["passed"])
    assert ("Failed" in top) == bool(validation and not validation["passed"])
    assert ("Undecided" in top) == (verdict == "undecided")
    assert ("Dense attention is right here" in top) == (verdict == "dense")
    assert ("not validated yet" in top) == (validation is None and verdict == "sparse")
    assert ("No result here is about this policy" in top) == (validation is None and tuning is None)
    assert ("the search was stopped" in top) == (tuning is not None and tuning["ended"] == "interrupted")
    assert ("It failed its validation" in said) == bool(validation and not validation["passed"])
    assert "`" not in said
    assert ("nothing to apply" in said) == (policy["rules"] == [])
    assert "dense below 512" not in said, "prompts of 512 to 562 tokens run dense too"
    assert ("is enough" in said or "Tuned to" in said) <= (policy["rules"] != []), "a dense policy has no density"
    reference = tuning.get("reference", "") if tuning else ""
    assert ("Drift cannot be measured" in top) == reference.startswith("none: no time")
    assert reference.removeprefix("none: ") in top
    if tuning and tuning["advice"]:
        assert tuning["advice"] in top
    if validation is None:
        assert tuning is None or tuning["why"][1:] in top
        assert "times the speed of dense" not in said
        assert "of its 4 checks" not in said
    else:
        failed = [check for check in validation["checks"] if not check["passed"]]
        assert (f"fails {len(failed)} of its {len(validation['checks'])} checks" in top) == bool(failed)
        for check in validation["checks"]:
            assert check["said"] in said
            assert (check["said"] in top) >= (not check["passed"] or check["unclear"])
        longest = validation["speed"][-1] if validation["speed"] else {"seqlen": 0, "low": 0.0, "high": 0.0}
        timed, short = bool(validation["speed"]), longest["seqlen"] < validation["window_tokens"]
        if timed:
            interval = f"{longest['low']:.2f} to {longest['high']:.2f} measured" if longest["pairs"] > 1 else "one pair"
            assert f"{longest['speedup']:.2f} times the speed of dense ({interval}" in top
        unclear = longest["low"] <= 1 <= longest["high"]
        assert (f"{longest['seqlen']:,} tokens are not clearly faster" in top) == (unclear and not failed and not short)
        assert (f"The speed is known up to {longest['seqlen']:,} tokens" in top) == (timed and short)
        assert ("The speed was not measured." in top) == ("Speed was not measured." in top) == (not timed)
        assert (
            "Attention alone, with the choice of blocks, runs at 1.30 times the speed of dense at 4,096" in top
        ) == short
        assert ("which is part of the speed" in top) == bool(validation["layer_calls"]["own_pattern_calls"])
        assert ("tasks made on the spot" in said) == bool(validation["tasks"])
        assert f"{100 * validation['density']:.1f} %" in top
        assert f"{validation['window_tokens']:,} tokens" in top


def test_attention_alone_is_said_of_lengths_that_run_sparse(tmp_path):
    """Here 256 and 1,024 tokens were timed, and the policy runs 700 sparse and 256 dense."""
    page = page_of(tmp_path, validation=made.validation(whole=False) | {"window_tokens": 700})
    assert "Prompts of 700 tokens were not timed." in plain(page.text)
    assert "Attention alone, with the choice" not in page.text


FOREIGN = {
    "tuning": {"about": made.about(DENSE)},
    "validation": {"about": made.about(DENSE)},
    "profile": {"about": {"model": "another", "text": made.TEXT}},
    "analysis": {"about": {"model": made.MODEL, "text": "another"}},
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("about", ["another", "none", "null"])
def test_a_result_about_something_else_is_not_shown(tmp_path, name, about):
    """Whatever else is in the folder, a stale file adds a notice and no figure."""
    documents = {each: make() for each, make in DOCUMENTS.items()} | {"analysis": SMALL}
    changed = FOREIGN[name] if about == "another" else {"about": {} if about == "none" else None}
    documents[name] = documents[name] | changed
    page = page_of(tmp_path / "run", **documents)
    without = page_of(tmp_path / "without", **documents | {name: None})
    reason = "is about another" if about == "another" else "does not say what it is about"
    assert f"{name}.json {reason}" in page.text
    verdict_of = lambda page: plain(page.text)[: plain(page.text).index("density" if name != "profile" else "Where")]
    stale = re.sub(rf" {name}\.json [^.]*\.", "", verdict_of(page))
    assert stale == verdict_of(without)
    assert ("Passed" in page.text) == (name != "validation")
    command = {"validation": f"dynaxx validate smollm2 {tmp_path}/run/policy.json"}
    assert "Make it again with" in page.text
    assert command.get(name, "dynaxx") in page.text


def test_a_policy_that_was_changed_has_no_results(tmp_path):
    edited = made.policy() | {"dense_below": 400, "sparse_from": 400}
    page = page_of(tmp_path, policy=edited)
    assert "No result here is about this policy." in page.text
    assert "Passed" not in page.text
    assert "tuning.json is about another policy" in page.text
    evidence = made.policy() | {"evidence": [{"what": "a look", "command": "dynaxx x", "values": {}}]}
    assert "Passed" in page_of(tmp_path, policy=evidence).text, "evidence does not change what a policy does"
    page = page_of(tmp_path, policy=DENSE)
    assert "The policy runs everything dense." in page.text


@pytest.mark.parametrize("content", ['{"format": "dynaxx.pol', "[]", json.dumps(made.policy() | {"rolout": {}})])
def test_nothing_passes_while_the_policy_cannot_be_read(tmp_path, content):
    folder = write_documents(tmp_path)
    (folder / "policy.json").write_text(content)
    page = Page(write_report(folder).read_text())
    assert "The policy cannot be read. Make it again with dynaxx tune" in page.text
    assert "Passed" not in page.text
    assert "policy.json" in page.text


def test_a_validation_on_another_text_says_so(tmp_path):
    found = made.validation()
    found["about"]["text"] = "another"
    page = page_of(tmp_path, validation=found)
    assert "It was validated on another text than it was tuned on." in page.text
    assert "another than the policy was tuned on" in page.text


def test_a_busy_machine_is_said_with_every_time(tmp_path):
    profile, tuning, validation = made.profile(), made.tuning(), made.validation()
    profile["busy"] = tuning["busy"] = True
    validation["busy"] = "The machine was busy while prompts of 8,192 tokens were timed."
    validation["speed"][-1]["busy"] = True
    page = page_of(tmp_path, profile=profile, tuning=tuning, validation=validation)
    assert page.text.count("The machine was busy while this was timed, so times are too long.") == 2
    assert validation["busy"] in page.text
    assert page.text.count(", machine busy") == 3, "beside two figures, and on a mark of a chart"
    assert "comes from; the machine was busy" in page.text
    page = page_of(tmp_path / "tuned", profile=profile, tuning=tuning, validation=None)
    assert "The machine was busy while attention was timed." in page.text


def test_options_are_not_broken_and_stay_text(tmp_path):
    advice = 'Run it with --time-budget "<15m>": it continues.'
    page = page_of(
        tmp_path, validation=None, tuning=made.tuning("undecided", "time") | {"advice": advice}, policy=DENSE
    )
    assert "--time-budget" in [each for each in page.words if each.startswith("--")]
    assert advice in page.text


def test_what_was_left_out_is_said(tmp_path):
    validation = made.validation() | {"skipped": ["generated text", "the speed at 8,192 tokens"], "repetition": None}
    page = page_of(tmp_path, validation=validation, profile=made.profile() | {"left_out": [32768]})
    assert "Not measured for lack of time: generated text, the speed at 8,192 tokens." in page.text
    assert "Not measured for lack of time: 32,768 tokens." in page.text


def test_a_policy_for_decoding_alone_claims_nothing_about_prompts(tmp_path):
    rule = {"layers": [0], "heads": "all", "phase": "decode", "attention": {"kind": "full"}}
    policy = made.policy() | {"rules": [rule], "decode_dense_below": 4096}
    tuning = made.tuning("dense", of=policy) | {"decode": {"said": "steps are 1.3x as fast at 8,192 tokens"}}
    validation = made.validation(of=policy) | {"sparse_from": None, "speed": [], "density": 1.0}
    page = page_of(tmp_path, policy=policy, tuning=tuning, validation=validation)
    assert "Yes: decoding under the policy keeps quality. Prompts run dense." in page.text
    assert "tokens were not timed" not in page.text
    assert "decoding over long contexts runs sparse" in page.text
    assert "long prompts run sparse" not in page.text
    page = page_of(tmp_path / "tuned", policy=policy, tuning=tuning, validation=None)
    assert "Dense attention is right here for prompts." in page.text
    assert "Decoding: steps are 1.3x as fast at 8,192 tokens." in page.text


def test_commands_name_the_folder_the_model_and_the_text(tmp_path):
    folder = tmp_path / "a run"
    tuning = made.tuning() | {
        "command": f"dynaxx tune ./my-model --tokens 512 --text 'my prompts.txt' --out '{folder}'"
    }
    page = page_of(folder, tuning=tuning, validation=None, analysis=None)
    text, source = page.text, "--text 'my prompts.txt'"
    assert f"dynaxx validate ./my-model '{folder}'/policy.json {source}" in text
    assert f"dynaxx analyze ./my-model {source} --out '{folder}'" in text
    assert f'dynaxx.load_policy("{folder}/policy.json")' in text
    odd = made.tuning() | {"command": "dynaxx tune --tokens 'unclosed"}
    page = page_of(tmp_path / "odd", tuning=odd, profile=None, analysis=None, validation=None)
    assert "dynaxx validate SmolLM2-135M-Instruct" in page.text


@pytest.mark.parametrize("tolerance", [0.0, 0.0005, 0.5])
def test_any_tolerance_has_a_chart(tmp_path, tolerance):
    page = page_of(tmp_path, tuning=made.tuning() | {"tolerance": tolerance}, validation=None)
    assert f"may rise by {100 * tolerance:.2f} % over dense" in plain(page.text)
    assert len(re.findall("<svg", page.raw)) == 6


def test_charts_keep_the_size_of_their_words(tmp_path):
    """A chart of three layers is not blown up to the width of the page."""
    few = made.tuning() | {"layers": [0, 1, 2], "budgets": [[0.1, 0.5, 0.9]] * 3}
    for svg in re.findall(r"<svg [^>]*>", page_of(tmp_path, tuning=few).raw)[1:]:
        width = re.search(r'width="(\d+)"', svg).group(1)
        assert f"--w:{width}" in svg
    assert "max-width: calc(1.25px * var(--w))" in page_of(tmp_path).raw
    hint = "move the chart sideways"
    assert hint in page_of(tmp_path).text
    assert hint not in page_of(tmp_path, tuning=few).text


def test_one_pair_of_runs_has_no_interval(tmp_path):
    """Nor does it show that prompts are slower."""
    page = plain(page_of(tmp_path, validation=made.validation(speedup=0.98, spread=0.0, pairs=1)).text)
    assert "8,192 tokens are not clearly faster" in page
    assert not re.search(r"([\d.]+) to \1\b", page)


def test_facts_about_the_machine_have_units(full):
    assert "memory 7.6 GiB" in full.text


def test_the_verdict_before_tuning():
    headline = lambda documents: plain(verdict(documents).headline)
    assert headline({}) == "Nothing has been measured yet."
    cheap = made.profile() | {"worth_it": False}
    assert headline({"profile": cheap}).startswith("Not worth it here: attention is only 39 %")
    assert headline({"profile": cheap | {"worth_it": None, "busy": True}}).endswith("tokens; the machine was busy.")
    short = cheap | {"worth_it": None, "left_out": [16384]}
    assert (
        headline({"profile": short})
        == "Attention is 39 % of the prefill at 8,192 tokens; longer prompts were not timed."
    )
    assert headline({"profile": made.profile()}).startswith("Worth trying: attention is 39 %")
    windows = cheap | {"lengths": [each | {"windowed_share": 0.4} for each in cheap["lengths"]]}
    assert headline({"profile": windows}).startswith(
        "A policy is not worth it here: attention in layers without a window is only 39 %"
    )
    assert "48 %" in plain(verdict({"analysis": SMALL}).sentence)


def test_kinds_of_text_that_tuning_did_not_see_are_shown():
    kinds = [{"kind": kind, "ratio": 1.002, "error": 0.001, "passed": True} for kind in ("sample", "legal")]
    held_out = [
        {"kind": "legal", "density": 0.178, "ratio": 1.0123, "error": 0.002, "passed": False},
        {"kind": "sample", "density": None, "ratio": None, "error": None, "passed": False},
    ]
    chosen = made.tuning()["chosen"] | {"kinds": kinds}
    table = tuning_section(made.tuning() | {"chosen": chosen, "held_out": held_out}, {})["kinds"]
    plain = [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in table["rows"]]
    assert len(table["header"]) == 6
    assert [row[0] for row in plain] == ["sample", "licence texts"]
    assert plain[0][3:] == ["not measured", "", ""]
    assert plain[1][1].startswith("+0.2")
    assert plain[1][3].startswith("+1.2")
    assert plain[1][5] == "17.8 %"
    alone = tuning_section(made.tuning() | {"chosen": chosen}, {})["kinds"]
    assert len(alone["header"]) == 3
    assert tuning_section(made.tuning(), {})["kinds"]["rows"] == []


def test_figures_in_words():
    assert [plain(percent(0.213)), plain(percent(0.01, 1))] == ["21 %", "1.0 %"]
    assert [plain(change(x)) for x in (1.006, 0.9998, 1.0105)] == ["+0.60 %", "-0.02 %", "+1.05 %"]
    assert [times(x) for x in (1.0, 1.13, 1.64)] == [f"1.00{X}", f"1.13{X}", f"1.64{X}"]


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{ 7 * 7 }}&amp;</style></title>"


def _poisoned(value):
    if isinstance(value, dict):
        return {HOSTILE if key == "hostile" else key: _poisoned(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_poisoned(each) for each in value]
    return HOSTILE if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9+/=]{64,}", value) else value


def test_hostile_strings_stay_text(tmp_path):
    poisoned = {name: _poisoned(SMALL if name == "analysis" else make()) for name, make in DOCUMENTS.items()}
    poisoned["analysis"]["rules"][HOSTILE] = poisoned["analysis"]["rules"]["oracle"]
    poisoned["analysis"]["summary"]["kinds"][HOSTILE] = 3
    poisoned["profile"]["machine"][HOSTILE] = HOSTILE
    poisoned["validation"]["tasks"][0][HOSTILE] = HOSTILE
    page = report(tmp_path / "run", **poisoned)
    assert page.all("script") == []
    assert {attributes.get("src", "")[:22] for attributes in page.all("img")} == {"data:image/png;base64,"}
    assert HOSTILE in " ".join(page.words)
    assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|49&amp;", page.raw)
    for svg in re.findall(r"<svg.*?</svg>", page.raw, flags=re.DOTALL):
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '"text"', '{"lengths": 3}', "\udcff"],
    ids=["cut", "list", "empty", "str", "odd", "bytes"],
)
def test_a_broken_file_costs_its_part_only(tmp_path, name, content):
    folder = write_documents(tmp_path / "run", analysis=SMALL)
    (folder / f"{name}.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    page = Page(write_report(folder).read_text())
    assert f"{name}.json" in page.text
    assert "Make it again with" in page.text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_that_lacks_any_one_field_never_breaks_the_page(tmp_path, name):
    whole = SMALL if name == "analysis" else DOCUMENTS[name]()
    for key in whole:
        without = {other: value for other, value in whole.items() if other != key}
        report(tmp_path / key, ("policy", name), **{name: without})
    for key in whole:
        report(tmp_path / "null", ("policy", name), **{name: whole | {key: None}})


def test_heatmaps_are_small_pngs_of_the_right_pixels():
    uri = pictures.heatmap_uri(bytes([0, 1, 255, 160]), 2)
    png = base64.b64decode(uri.split(",")[1])
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind] = data
        at += 12 + length
    rows = zlib.decompress(chunks[b"IDAT"])
    assert rows[0] == rows[3] == 0, "filter bytes"
    empty, faint, full, half = rows[1], rows[2], rows[4], rows[5]
    assert empty == faint == 0
    assert 0 < half < full == pictures.LEVELS - 1
    assert chunks[b"tRNS"][0] == 0
    assert len(chunks[b"PLTE"]) == 3 * len(chunks[b"tRNS"]) == 3 * pictures.LEVELS


def test_line_charts_with_little_in_them():
    axes = Axes("x", "y", str, str, y_lines=(Line(1.0, "limit"),))
    for points in ([Point(1, 2)], [Point(1, 1), Point(1, 1)], [Point(1, 1), Point(2, 1)]):
        ElementTree.fromstring(charts.line_chart([ChartLine("a", points), ChartLine("none", [])], axes, alt="a"))
    ElementTree.fromstring(
        charts.line_chart([ChartLine("a", [Point(64, 1.0)])], Axes("x", "y", str, str, log_x=True), alt="b")
    )


def test_words_beside_bars_and_lines_fit_in_wide_fonts():
    drawn = charts.stacked_bars([("512", [("attention", 0.3), ("rest", 0.7)], "930 ms")], alt="shares", width=400)
    start = float(re.search(r'<text[^>]* x="([\d.]+)"[^>]*>930 ms', drawn)[1])
    assert start + 7.1 * len("930 ms") <= 400  # DejaVu Sans has 7.1 px a character
    lines = [ChartLine("min/max bound", [Point(1, 1), Point(2, 2)], "accent")]
    drawn = charts.line_chart(lines, Axes("x", "y"), alt="lines")
    start = float(re.search(r'<text[^>]* x="([\d.]+)"[^>]*>min/max bound', drawn)[1])
    assert start + 8.5 * len("min/max bound") <= 400  # in bold


def test_words_on_a_chart_cover_neither_its_line_nor_each_other():
    """Labels avoid a line that crosses the reference line several times."""
    points = [Point(64, 1.0), Point(512, 1.0), Point(640, 0.83), Point(1024, 1.09)]
    axes = Axes("tokens", "speed", log_x=True, y_range=(0, 1.2), y_lines=[Line(1.0, "dense")],
                x_lines=[Line(512, "sparse from 512")])  # fmt: skip
    drawn = ElementTree.fromstring(charts.line_chart([ChartLine("prefill", points)], axes, alt="speed"))
    words = {
        each.text: each.attrib for each in drawn.iter("text") if each.text in ("dense", "sparse from 512", "prefill")
    }
    boxes = {}
    for said, at in words.items():
        width = len(said) * CHAR
        left = float(at["x"]) - width * (at["text-anchor"] == "end")
        boxes[said] = (left, left + width, float(at["y"]) - 11, float(at["y"]) + 3)
    line = [tuple(map(float, pair.split(","))) for pair in drawn.find(".//polyline").get("points").split()]
    for said, (left, right, top, bottom) in boxes.items():
        for other, (a, b, c, d) in boxes.items():
            assert said == other or right <= a or b <= left or bottom <= c or d <= top, (said, other)
        for (x0, y0), (x1, y1) in pairwise(line):
            for step in range(101):
                x, y = x0 + (x1 - x0) * step / 100, y0 + (y1 - y0) * step / 100
                assert not (left < x < right and top < y < bottom), (said, x, y)


def test_figures_name_the_command_that_made_them(tmp_path):
    command = "dynaxx tune ./m --text prompts.txt --tokens 1024"
    for name in ("profile", "validation"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**DOCUMENTS[name](), "command": command}))
    text = Page(write_report(tmp_path).read_text()).text
    assert text.count(command) >= 3  # beside each, and in the list
    assert "dynaxx profile" not in text


@pytest.mark.slow
def test_many_heads_stay_a_small_page(tmp_path):
    analysis = made.analysis(layers=32, heads=32, size=64)
    path = write_report(write_documents(tmp_path / "run", analysis=analysis))
    assert path.stat().st_size < 3_000_000
    assert len(Page(path.read_text()).all("img")) == 1024


def test_a_second_report_replaces_the_first_and_leaves_nothing_else(tmp_path):
    folder = write_documents(tmp_path / "run", ("profile",))
    write_report(folder)
    first = (folder / "report.html").read_text()
    write_documents(folder, ("tuning",))
    write_report(folder)
    assert (folder / "report.html").read_text() != first
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "report.html", "tuning.json"]


def test_no_such_folder(tmp_path):
    with pytest.raises(ValueError, match="must be a folder"):
        write_report(tmp_path / "none")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1440, 390])
def test_a_browser_shows_it_without_sideways_scrolling(tmp_path, width):
    """A frame of this width measures the page, since no window is so narrow: no element may extend beyond it."""
    folder = write_documents(tmp_path / "run", analysis=SMALL)
    page = write_report(folder).read_text()
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    measure = (
        "const page = document.querySelector('iframe').contentDocument, e = page.documentElement;"
        "document.title = `wide ${e.scrollWidth - e.clientWidth} of ${e.clientWidth} images "
        "${[...page.images].filter(i => i.complete && i.naturalWidth > 0).length}`"
    )
    frame = f'<iframe scrolling="no" style="width: {width}px; border: 0" srcdoc="{escape(page)}"></iframe>'
    (folder / "measured.html").write_text(f'<body onload="{measure}">{frame}</body>')
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1600,900", "--dump-dom"]
    shown = subprocess.run(
        [*command, (folder / "measured.html").as_uri()], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found = re.search(r"<title>wide (-?\d+) of (\d+) images (\d+)</title>", shown)
    assert found, shown[:200]
    assert int(found[1]) <= 0
    assert [int(found[2]), int(found[3])] == [width, 12]


def test_patterns_of_the_policy_are_drawn():
    rules = [dx.Rule.of(dx.SlidingWindow(128) | dx.Sink(16) | dx.TopK(0.2), layers=[0]),
             dx.Rule.of(dx.SlidingWindow(256), layers=[1]), dx.Rule.of(None, layers=[2])]  # fmt: skip
    document = made.policy() | {"rules": [rule.model_dump(mode="json") for rule in rules]}
    drawn = pattern_pictures(document)
    assert [picture["caption"] for picture in drawn] == [
        "always visible; the rule adds blocks by content",
        "visible keys",
    ]
    assert all(picture["uri"].startswith("data:image/png;base64,") for picture in drawn)
    assert drawn[0]["uri"] != drawn[1]["uri"]
    assert pattern_pictures(made.policy()) == []
    assert pattern_pictures(document | {"rules": "none"}) == []


def test_importing_the_report_loads_no_heavy_library():
    heavy = "('matplotlib', 'transformers', 'jinja2')"
    code = f"import sys, dynaxx.lab.report; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_kinds_of_text_and_long_tasks_are_shown(tmp_path):
    found = made.validation()
    interval, share = {"mean": 0.02, "low": -0.01, "high": None}, {"mean": 0.8, "low": 0.4, "high": 1.0}
    row = {
        "task": "vt",
        "tokens": 4096,
        "dense_match": share,
        "sparse_match": share,
        "drop": interval,
        "verdict": "holds",
    }
    kind = {
        "kind": "code",
        "label": "Python source code",
        "tokens": 4095,
        "dense": 4.2,
        "ratio": 1.0138,
        "error": 0.0015,
    }
    said = "perplexity +1.38 % (limit +1.00 %) on Python source code"
    check = {"name": "perplexity_ratio", "value": 1.0138, "limit": 1.01, "passed": False, "where": "code", "said": said}
    found |= {"suite": {"rows": [row]}, "kinds": [kind], "checks": [*found["checks"], check]}
    page = report(tmp_path / "run", analysis=SMALL, validation=found)
    assert "vt, 4,096 tokens" in page.text
    assert page.text.count(said) == 2, "in the verdict and in the table"
    assert "Perplexity by kind of text" in page.text
