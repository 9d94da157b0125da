# SPDX-License-Identifier: Apache-2.0
"""Each command calls its tool with its options, and prints and writes what the tool returns."""

import json
import sys

from transformers import AutoModelForCausalLM

import dynaxx
from command_line import CHECKED, FACTS, Validation, dynaxx_, stand_in
from dynaxx.lab.about import about
from dynaxx.lab.doctor import run as doctor
from dynaxx.lab.profile import run as profile
from dynaxx.policy import save_policy
from tiny import TEXT


def test_doctor(monkeypatch):
    args = ("doctor", "--q-heads", 2, "--kv-heads", 1, "--head-dim", 16, "--seqlen", 64, "--block-size", 16)
    shown = dynaxx_(*args, "--json", "--quiet")
    assert shown.exit_code == 0
    assert shown.stderr == ""
    assert json.loads(shown.stdout)["ok"] is True
    assert "all checks passed" in dynaxx_(*args).stdout
    monkeypatch.setattr(doctor.Expected, "forward", lambda *args: [doctor.ErrorReport("out", 1.0, 0.1)])
    wrong = dynaxx_(*args, "--json")
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["ok"] is False


def test_profile(tiny, tmp_path):
    args = ("profile", tiny, "--text", tiny.parent / "text.txt", "--lengths", "32,64", "--price-per-hour", 2)
    shown = dynaxx_(*args, "--json", "--out", tmp_path, "--trace", tmp_path / "t.json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout) == json.loads((tmp_path / "profile.json").read_text())
    assert json.loads(shown.stdout)["model"] == "tiny"
    assert (tmp_path / "t.json").is_file()
    human = dynaxx_(*args, "--quiet", "--out", tmp_path)
    assert "attention's share of prefill" in human.stdout
    assert f"wrote {tmp_path / 'profile.json'}" in human.stdout


def test_a_stopped_profile_goes_on(tiny, tmp_path, monkeypatch):
    measure, seen = profile._measure, []

    def stopped_at(stop):
        def run(model, ids, *given):
            seen.append(ids.shape[1])
            if ids.shape[1] == stop:
                raise KeyboardInterrupt
            return measure(model, ids, *given)._replace(busy=ids.shape[1] == 32)

        return run

    monkeypatch.setattr("dynaxx.lab.time_budget.watch_others", lambda: lambda: False)
    args = ("profile", tiny, "--text", tiny.parent / "text.txt", "--lengths", "32,64,96", "--out", tmp_path)
    monkeypatch.setattr(profile, "_measure", stopped_at(64))
    shown = dynaxx_(*args)
    assert shown.exit_code == 130
    assert shown.stderr.endswith("stopped; run the same command again to continue\n")
    monkeypatch.setattr(profile, "_measure", stopped_at(None))
    assert dynaxx_(*args).exit_code == 0
    assert seen == [32, 64, 64, 96]
    assert {path.name for path in tmp_path.iterdir()} == {"profile.json"}
    found = json.loads((tmp_path / "profile.json").read_text())
    assert ([row["seqlen"] for row in found["lengths"]], found["ended"]) == ([32, 64, 96], "done")
    assert found["busy"], "also of what an earlier run timed"


def test_analyze(tools, tiny, tmp_path):
    shown = dynaxx_("analyze", tiny, "--text", tiny.parent / "text.txt", "--layers", "0,3-5", "--out", tmp_path,
                    "--bertviz", tmp_path / "b.html", "--json")  # fmt: skip
    assert shown.exit_code == 0, shown.stderr
    (_, _, text), options = tools["analyze"][0]
    assert 0 < len(text) < len(TEXT)  # the calibration part
    assert options["layers"] == (0, 3, 4, 5)
    assert options["heads"] is None
    assert "bertviz" in tools
    assert json.loads((tmp_path / "analysis.json").read_text())["tokens"] == 256


def test_validate(tools, monkeypatch, tiny, tmp_path):
    chosen, policy = dynaxx.Policy(model=FACTS), tmp_path / "policy.json"
    save_policy(chosen, policy)
    args = ("validate", tiny, policy, "--lengths", "64,128")
    assert dynaxx_(*args).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"policy.json", "validation.json"}, "beside the policy"
    (_, _, document, text), options = tools["validate"][0]
    assert document == chosen
    assert len(text) > 300_000
    assert options["lengths"] == (64, 128)
    stand_in(monkeypatch, "validate.run", **CHECKED, validate=lambda *args, **kwargs: Validation(passed=False))
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/dynaxx", "validate", "a model", "--json"])
    failed = dynaxx_(*args, "--json")
    assert failed.exit_code == 1
    found = json.loads(failed.stdout)
    assert found["passed"] is False
    assert found["about"] == about(AutoModelForCausalLM.from_pretrained(tiny), text, chosen)
    assert found["command"] == "dynaxx validate 'a model' --json"
    (tmp_path / "report.html").write_text("the page of what was validated before")
    assert f"wrote {tmp_path / 'report.html'}" in dynaxx_(*args).stdout, "a page never outlives its results"
    elsewhere = tmp_path / "elsewhere"
    assert dynaxx_(*args, "--out", elsewhere).exit_code == 1
    assert {path.name for path in elsewhere.iterdir()} == {"validation.json"}


def test_report(tools, tmp_path):
    (tmp_path / "policy.json").write_text("{}")
    assert f"wrote {tmp_path / 'report.html'}" in dynaxx_("report", tmp_path).stdout
    assert json.loads(dynaxx_("report", tmp_path, "--json").stdout) == {"report": str(tmp_path / "report.html")}


def test_bench(tools, monkeypatch, tmp_path):
    shown = dynaxx_("bench", "--seqlen", 1024, "--device", "cpu", "--json", "--out", tmp_path / "b.json", "--seed", 3)
    assert json.loads(shown.stdout) == {"rows": []}
    assert (tmp_path / "b.json").is_file()
    ((device,), options) = tools["bench"][0]
    assert (device, options["seqlen"], options["seed"]) == ("cpu", 1024, 3)

    def told(device, say, **options):
        say("one figure")
        return {"rows": []}

    stand_in(monkeypatch, "bench", run_bench=told)
    shown = dynaxx_("bench")
    assert shown.stdout == "one figure\n"
    assert shown.stderr.startswith("testing the kernels"), "the first figure takes a while"

    def wrong(device, **options):
        raise RuntimeError("out: error 1, budget 0.1")

    stand_in(monkeypatch, "bench", run_bench=wrong)
    failed = dynaxx_("bench", "--json")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert "budget" in failed.stderr
