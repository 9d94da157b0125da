# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune` runs its steps, keeps what is done, and says what it found."""

import json
import os
import sys

import pytest

import dynaxx
from command_line import CHECKED, POLICY, Result, Validation, dynaxx_, stand_in
from dynaxx.lab.files import alone_in, write_result
from given_times import give_prefill_times, twice_as_fast
from tiny import TEXT


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def tune_args(tiny, out, *more):
    return (
        "tune",
        tiny,
        "--text",
        tiny.parent / "text.txt",
        "--out",
        out,
        "--lengths",
        "32,64",
        "--tokens",
        128,
        *more,
    )


def test_tune_goes_the_whole_way(tools, tiny, tmp_path):
    out = tmp_path / "run"
    shown = dynaxx_(*tune_args(tiny, out, "--time-budget", "10h", "--tolerance", "0.02", "--json"))
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["ok"] is True
    assert found["tuning"]["chosen"]["density"] == 0.2
    assert list(found["seconds"]) == ["start", "profile", "tune", "validate", "analyze", "report"]
    assert {path.name for path in out.iterdir()} == {
        "run.json", "profile.json", "analysis.json", "policy.json", "validation.json", "report.html",
    }  # fmt: skip
    (text, options), _ = tools["tune"][0]
    assert text == TEXT
    assert (options.time_budget, options.tolerance, options.tokens) == (36000.0, 0.02, 128)
    assert tools["validate"][0][0][2] is POLICY
    assert tools["validate"][0][1]["lengths"] == (32, 64)
    shown = dynaxx_(*tune_args(tiny, out))
    assert "prompts run sparse from 512 tokens, shorter ones dense" in shown.stdout
    assert f'run it: dynaxx.apply(model, dynaxx.load_policy("{out / "policy.json"}"))' in shown.stdout


def test_tune_does_not_repeat_what_it_did(tools, tiny, tmp_path):
    first = dynaxx_(*tune_args(tiny, tmp_path))
    assert first.exit_code == 0, first.stderr
    before = (tmp_path / "profile.json").stat().st_mtime_ns
    dynaxx_(*tune_args(tiny, tmp_path))
    assert (tmp_path / "profile.json").stat().st_mtime_ns == before
    assert len(tools["analyze"]) == 1
    assert len(tools["tune"]) == 2  # keeps its own state
    dynaxx_(*tune_args(tiny, tmp_path, "--seed", 1))  # the sample of the analysis depends on it
    assert (tmp_path / "profile.json").stat().st_mtime_ns == before
    assert len(tools["analyze"]) == 2
    settings = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert (settings["seed"], settings["tolerance"], settings["scorers"]) == (1, 0.01, ["mean", "bounds"])
    dynaxx_(*tune_args(tiny, tmp_path, "--seed", 1, "--restart"))
    assert len(tools["analyze"]) == 3
    before = (tmp_path / "profile.json").stat().st_mtime_ns
    dynaxx_(*tune_args(tiny, tmp_path, "--seed", 1, "--threads", 2))
    assert (tmp_path / "profile.json").stat().st_mtime_ns > before, "its times are of one thread"
    assert len(tools["analyze"]) == 3


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_two_runs_never_write_into_one_folder(tools, tiny, tmp_path):
    with alone_in(tmp_path / "run"):
        shown = dynaxx_(*tune_args(tiny, tmp_path / "run"))
    assert shown.exit_code == 2
    assert f"another run works in {tmp_path / 'run'}; wait until it ends, or give another --out" in shown.stderr
    assert not (tmp_path / "run").exists(), "nothing was written"
    assert dynaxx_(*tune_args(tiny, tmp_path / "run")).exit_code == 0


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_a_child_that_outlives_a_run_does_not_keep_its_folder(tmp_path):
    (wait, go), (there, say) = os.pipe(), os.pipe()
    with alone_in(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(go)
            os.write(say, b"1")
            os.read(wait, 1)
            os._exit(0)
        assert os.read(there, 1)
    try:
        with alone_in(tmp_path):
            pass
    finally:
        os.close(go)
        os.waitpid(child, 0)
        for each in (wait, there, say):
            os.close(each)


@pytest.mark.parametrize(("started", "left_out"), [(17.0, True), (1.0, False)])
def test_a_profile_never_takes_the_end_of_a_budget(tools, monkeypatch, tiny, tmp_path, started, left_out):
    monkeypatch.setattr(sys.modules["dynaxx.cli.tune"], "seconds_since_start", lambda: started)
    found = json.loads(dynaxx_(*tune_args(tiny, tmp_path, "--time-budget", 20, "--json")).stdout)
    assert ("profile" in found["left_out"]) == left_out


def test_a_run_without_time_keeps_the_validation_of_the_same_policy(tools, monkeypatch, tiny, tmp_path):
    dynaxx_(*tune_args(tiny, tmp_path))
    before = (tmp_path / "validation.json").read_bytes()
    monkeypatch.setattr(sys.modules["dynaxx.cli.tune"], "seconds_since_start", lambda: 100.0)
    short = (*tune_args(tiny, tmp_path), "--time-budget", 20)
    shown = dynaxx_(*short)
    assert shown.exit_code == 0, shown.stderr
    assert "passes its validation:\nno time was left for another one; that of an earlier run is kept" in shown.stdout
    assert (tmp_path / "validation.json").read_bytes() == before
    stale = {**json.loads(before), "about": {}}
    (tmp_path / "validation.json").write_text(json.dumps(stale))
    assert dynaxx_(*short).exit_code == 3
    assert not (tmp_path / "validation.json").exists(), "it was about another policy"


def test_tune_leaves_out_what_is_not_wanted(tools, tiny, tmp_path):
    flags = ("--no-profile", "--no-analysis", "--no-validation", "--no-report")
    assert dynaxx_(*tune_args(tiny, tmp_path, *flags)).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "policy.json"}


def test_tune_fails_when_the_policy_does(tools, monkeypatch, tiny, tmp_path):
    stand_in(monkeypatch, "validate.run", **CHECKED, validate=lambda *args, **kwargs: Validation(passed=False))
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 1
    assert "tuned: 20% keep perplexity\n20.0% of the blocks, perplexity +0.40%; one budget" in shown.stdout
    assert "FAILS its validation:\nsome checks" in shown.stdout
    assert "run it" not in shown.stdout
    assert "report.html" in shown.stdout


def test_tune_without_a_possible_validation_still_reports(tools, monkeypatch, tiny, tmp_path):
    def refuse(*args, **kwargs):
        raise ValueError("the policy is dense below 10,000 tokens")

    stand_in(monkeypatch, "validate.run", **CHECKED, validate=refuse)
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 1
    assert "could not be validated:\nthe policy is dense below" in shown.stdout
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "validation.json").exists()


def test_tune_has_nothing_to_validate_where_sparse_never_pays(tools, monkeypatch, tiny, tmp_path):
    real = vars(sys.modules["dynaxx.lab.tune.run"])

    def dense(*args, **kwargs):
        changed = dict(sparse_from=None, verdict="dense", why="not faster here", policy=POLICY.replace(rules=()))
        return Result(**{**vars(real["tune"](*args, **kwargs)), **changed})

    stand_in(monkeypatch, "tune.run", **{**real, "tune": dense})
    stand_in(monkeypatch, "validate.run", **CHECKED, validate=lambda *_, **__: pytest.fail("validated"))
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 0, shown.stderr
    assert "dense is right here: not faster here" in shown.stdout
    assert "validation" not in shown.stdout
    assert "run it" not in shown.stdout


@pytest.mark.parametrize(("ended", "code"), [("time", 3), ("interrupted", 130)])
def test_tune_that_decided_nothing_says_so(tools, monkeypatch, tiny, tmp_path, ended, code):
    real = vars(sys.modules["dynaxx.lab.tune.run"])

    def undecided(*args, **kwargs):
        said = dict(ended=ended, verdict="undecided", why="nothing was tried", advice="--time-budget 5m would decide.")
        changed = dict(chosen=None, sparse_from=None, policy=POLICY.replace(rules=()))
        return Result(**{**vars(real["tune"](*args, **kwargs)), **said, **changed})

    stand_in(monkeypatch, "tune.run", **{**real, "tune": undecided})
    (tmp_path / "validation.json").write_text("{}")
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == code, shown.stderr
    assert "undecided: nothing was tried\n--time-budget 5m would decide." in shown.stdout
    assert "report.html" in shown.stdout
    assert not (tmp_path / "validation.json").exists(), "a validation of another policy does not stay"


def test_a_run_that_was_killed_goes_on(tools, monkeypatch, tiny, tmp_path):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    real = sys.modules["dynaxx.lab.tune.run"]
    stand_in(monkeypatch, "tune.run", **{**vars(real), "tune": killed})
    assert dynaxx_(*tune_args(tiny, tmp_path)).exit_code == 130
    monkeypatch.setitem(sys.modules, "dynaxx.lab.tune.run", real)
    assert dynaxx_(*tune_args(tiny, tmp_path)).exit_code == 0
    assert len(tools["analyze"]) == 1


@pytest.mark.slow
def test_tune_for_real(monkeypatch, tiny, tmp_path):
    """Run every tool on a tiny model: each can read what the one before has written."""
    give_prefill_times(monkeypatch, twice_as_fast(64, 128))
    args = tune_args(tiny, tmp_path, "--block-size", 16, "--tolerance", 0.5, "--time-budget", "9h", "--quiet")
    state = tmp_path / "validation_state.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("dynaxx.lab.validate.comparison.time_prefill", interrupted)
        assert dynaxx_(*args).exit_code == 130
        assert state.exists()
    with monkeypatch.context() as patch:
        twice = lambda *_: pytest.fail("compared twice")
        patch.setattr("dynaxx.lab.validate.comparison.Comparison._stretch", twice)
        shown = dynaxx_(*args)
    assert not state.exists()
    assert shown.exit_code in (0, 1), shown.stderr  # whether it is fast enough depends on the machine's other work
    digests = [json.loads((tmp_path / f"{name}.json").read_text())["about"] for name in ("tuning", "validation")]
    assert digests[0]["policy"] == digests[1]["policy"]
    assert digests[0]["model"] == digests[1]["model"]
    assert {"profile.json", "analysis.json", "tuning.json", "policy.json", "report.html"} <= set(os.listdir(tmp_path))
    assert dynaxx.load_policy(tmp_path / "policy.json")
    policy = (tmp_path / "policy.json").read_bytes()
    again = dynaxx_(*args, "--json")
    assert again.exit_code == int(not json.loads(again.stdout)["ok"])
    assert json.loads(again.stdout)["tuning"]["chosen"] == json.loads((tmp_path / "tuning.json").read_text())["chosen"]
    assert json.loads((tmp_path / "policy.json").read_text())["rules"] == json.loads(policy)["rules"]


@pytest.mark.parametrize("step", ["validate", pytest.param("analyze", marks=pytest.mark.slow)])
def test_a_stop_after_the_search_keeps_and_says_what_was_found(tools, monkeypatch, tiny, tmp_path, step):
    real = sys.modules[f"dynaxx.lab.{step}.run"]
    stand_in(monkeypatch, f"{step}.run", **{**vars(real), step: interrupted})
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 130
    assert "tuned: 20% keep perplexity" in shown.stdout
    validated = (
        "could not be validated:\nit was stopped; the same command" if step == "validate" else "passes its valid"
    )
    assert validated in shown.stdout
    assert "\nstopped; run the same command again to continue\n" in shown.stdout
    assert (tmp_path / "report.html").exists()
    monkeypatch.setitem(sys.modules, f"dynaxx.lab.{step}.run", real)
    assert dynaxx_(*tune_args(tiny, tmp_path)).exit_code == 0


def test_a_stop_while_the_validation_is_written_leaves_none(tools, monkeypatch, tiny, tmp_path):
    """The page and the summary say the same."""

    def write(path, document):
        if write_result(path, document).name == "validation.json":
            raise KeyboardInterrupt
        return path

    monkeypatch.setattr("dynaxx.lab.tune.pipeline.steps.write_result", write)
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 130
    assert "could not be validated:\nit was stopped" in shown.stdout
    assert not (tmp_path / "validation.json").exists()


def test_a_stop_before_the_search_says_that_it_goes_on(tools, monkeypatch, tiny, tmp_path):
    real = vars(sys.modules["dynaxx.lab.tune.run"])
    stand_in(monkeypatch, "tune.run", **{**real, "tune": interrupted})
    shown = dynaxx_(*tune_args(tiny, tmp_path))
    assert shown.exit_code == 130
    assert shown.stderr.endswith("stopped; run the same command again to continue\n")
