# SPDX-License-Identifier: Apache-2.0
"""What a search says that it found out."""

from dataclasses import replace
from pathlib import Path

import pytest

from dynaxx.lab.tune.crossover import LengthTiming
from dynaxx.lab.tune.density.candidates import Candidate
from dynaxx.lab.tune.density.guide import Guide, Tried
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.outcome import Timed, budget_of, decide
from dynaxx.lab.tune.pipeline.result import PipelineResult
from dynaxx.lab.tune.pipeline.steps import less_cut
from dynaxx.lab.tune.result import Trial
from dynaxx.lab.validate.check import Check

SPARSE = Tried(Candidate(0.4, [[0.4]], {}), Trial(0.4, 11.0, 1.004, 0.001, True))


class Any:
    least = 0.05

    def at(self, density):
        return Candidate(density, [[density]], {})


def guide_of(*trials):
    guide = Guide(Any(), Rises(0.01, 2, {"sample": 1000}), 1.02)
    for trial in trials:
        guide.learn(Candidate(trial.aim, [[trial.aim]], {}), trial)
    return guide


def outcome(**changes):
    given = {"ended": "done", "tuned": None, "usual": 1024, "needed": 400, **changes}
    found = Timed(given.pop("chosen", None), None, given.pop("timings", ()), given.pop("timed", True))
    of_options = {name: given.pop(name) for name in ("stretches", "tolerance") if name in given}
    return decide(found, TuneOptions("", Path(), tokens=given.pop("tokens", 1024), **of_options), **given)


@pytest.mark.parametrize("ended", ["time", "interrupted"])
def test_the_end_of_time_is_no_finding(ended):
    failed = guide_of(Trial(0.6, 11.0, 1.05, 0.001, False))
    for tuned in (None, guide_of(), failed):
        found = outcome(ended=ended, tuned=tuned)
        assert found.verdict == "undecided"
        assert "--time-budget 10m" in found.advice
        assert "decide" not in found.advice, "a search may also end undecided, by noise"
    untimed = outcome(ended=ended, chosen=SPARSE, timed=False)
    assert (untimed.verdict, untimed.border) == ("undecided", None)
    slower = (LengthTiming(512, 1.0, 1.0), LengthTiming(1024, 1.0, 1.0))
    some = outcome(ended=ended, chosen=SPARSE, timings=slower, timed=False)
    assert (some.verdict, "other lengths were not timed" in some.why) == ("undecided", True), "perhaps shorter ones"
    assert outcome(ended=ended, chosen=SPARSE, timings=slower).verdict == "undecided", "a sparser one may be faster"
    assert outcome(chosen=SPARSE, timings=slower).verdict == "dense"
    busy = outcome(chosen=SPARSE, timings=[slower[0], replace(slower[1], busy=True)])
    assert (busy.verdict, "on a quiet machine" in busy.advice) == ("undecided", True)


def test_a_run_without_a_budget_is_advised_none():
    for found in (dict(), dict(chosen=SPARSE, timings=[LengthTiming(1024, 2.0, 1.0)])):
        stopped = outcome(ended="interrupted", needed=None, **found)
        assert "--time-budget" not in stopped.advice
        assert "the same command" in stopped.advice


def test_fewer_blocks_are_promised_only_where_the_search_is_not_done():
    passed, failed = Trial(0.4, 11.0, 1.004, 0.001, True), Trial(0.395, 11.0, 1.05, 0.001, False)
    given = dict(ended="time", chosen=SPARSE, timings=[LengthTiming(1024, 2.0, 1.0)])
    assert outcome(**given, tuned=guide_of(passed)).advice.startswith("Fewer blocks may do: the same command with")
    done = outcome(**given, tuned=guide_of(passed, failed)).advice
    assert done == "Not everything was measured: the same command with --time-budget 10m continues."


def test_the_fewest_blocks_that_a_policy_can_have_are_no_finding_about_the_model():
    """The first block and the nearest ones are always visible, which is most of a short text."""
    fewest = Tried(Candidate(0.0501, [[0.05]], {}), Trial(0.05, 11.0, 1.0, 0.001, True))
    given = dict(tuned=guide_of(fewest.trial), timings=[LengthTiming(1024, 2.0, 1.0)])
    found = outcome(**given, chosen=fewest)
    assert found.why.endswith("within 1.000% at 1,024 tokens, where no policy with such blocks has fewer")
    assert found.advice == ""
    found = outcome(**given, chosen=fewest, usual=4096)
    assert found.advice.startswith("Longer texts need fewer blocks: --tokens 4096")
    assert "no policy" not in outcome(**given, chosen=SPARSE).why


@pytest.mark.parametrize(("tolerance", "shown"), [(0.00004, "0.004"), (1e-6, "0.0001"), (1e-8, "0.000001")])
def test_tiny_tolerances_are_shown_whole(tolerance, shown):
    found = outcome(tolerance=tolerance, chosen=SPARSE, timings=[LengthTiming(1024, 2.0, 1.0)])
    said = {"verdict": "sparse", "why": found.why, "sparse_from": 512}
    assert f"within {shown}% at" in PipelineResult(None, None, said, None, "", ()).summary()
    check = Check("perplexity_ratio", 1.01, 1 + tolerance, False)
    assert f"(limit +{shown}" in check.said


def test_short_texts_rule_nothing_out():
    slower, failed = (LengthTiming(512, 1.0, 1.0),), guide_of(Trial(0.9, 11.0, 1.05, 0.001, False))
    for found in (dict(chosen=SPARSE, timings=slower), dict(tuned=failed)):
        assert (outcome(**found).verdict, outcome(**found).advice) == ("dense", "")
        short = outcome(**found, usual=4096)
        assert short.verdict == "undecided"
        assert "at 1,024 tokens" in short.why
        assert "--tokens 4096" in short.advice


def test_nothing_sparse_stays_only_where_the_densest_candidate_failed():
    assert outcome(tuned=guide_of(Trial(0.9, 11.0, 1.014, 0.001, False))).verdict == "dense"
    assert outcome(tuned=guide_of(Trial(0.8, 11.0, 1.05, 0.001, False))).verdict == "undecided"
    for ratio, error in ((1.004, 0.005), (1.014, 0.003)):
        noisy = outcome(tuned=guide_of(Trial(0.9, 11.0, ratio, error, False)))
        assert noisy.verdict == "undecided", "the rise is within two standard errors of the limit"
        assert "--stretches 3," in noisy.advice
    more = outcome(tuned=guide_of(Trial(0.9, 11.0, 1.014, 0.003, False)), stretches=3)
    assert "--stretches 9," in more.advice, "what was done is not advised again"
    cut = outcome(ended="time", tuned=guide_of(Trial(0.9, 11.0, 1.014, 0.003, False)))
    assert "--time-budget 10m also tries" in cut.advice


def test_lengths_that_were_not_tuned_are_not_called_tuned():
    timings = [LengthTiming(n, 1.0, 1.0 if n < 2048 else 0.5) for n in (1024, 2048, 4096)]
    found = outcome(chosen=SPARSE, timings=timings, usual=2048)
    assert (found.verdict, found.border) == ("undecided", None)
    assert found.advice == "Tune at a length that would run sparse: --tokens 2048."
    disturbed = outcome(chosen=SPARSE, timings=[replace(each, busy=True) for each in timings], usual=4096)
    assert disturbed.why.endswith("faster here only from 2,048 while the machine is busy")
    assert disturbed.advice.startswith("Run the same command on a quiet machine"), "load moves the border"
    said = outcome(chosen=SPARSE, timings=timings, usual=4096).advice
    assert "--tokens 2048; longer texts need fewer blocks: --tokens 4096" in said, "else each advice leads to the next"
    found = outcome(chosen=SPARSE, timings=[LengthTiming(n, 1.0, 1.0 if n < 512 else 0.5) for n in (256, 512, 1024)])
    assert (found.verdict, found.border, found.advice) == ("sparse", 512, "")


def test_undecided_runs_are_not_ok():
    said = {"verdict": "undecided", "why": "time ended", "advice": "Run again.", "reference": "none: prompts run dense"}
    found = PipelineResult(None, None, said, None, "", (), left_out=("analyze",))
    assert not found.ok
    assert found.undecided
    assert found.summary().splitlines() == ["undecided: time ended", "Run again.", "left out for lack of time: analyze"]
    sparse = {"verdict": "sparse", "why": "40% of the blocks", "sparse_from": 512}
    unvalidated = PipelineResult(None, None, sparse, None, "no time was left for it", (), left_out=("validate",))
    assert unvalidated.undecided
    assert not unvalidated.ok
    assert "the policy could not be validated:\nno time was left for it" in unvalidated.summary()


def test_a_policy_without_its_reference_says_so_first():
    said = {"verdict": "sparse", "why": "40% of the blocks", "dense_below": 512}
    said["reference"] = "none: no time was left"
    found = PipelineResult(None, None, said, None, "", ())
    reason = "Drift cannot be measured, because no reference was recorded: no time was left."
    assert found.summary().startswith(f"tuned: 40% of the blocks. {reason}\n")
    said |= {"verdict": "dense", "dense_below": None, "reference": "none: prompts run dense"}
    assert "no reference" not in PipelineResult(None, None, said, None, "", ()).summary()


def test_budgets_are_round():
    assert [budget_of(seconds) for seconds in (1, 61, 400, 3600, 5000)] == ["1m", "2m", "10m", "1h", "2h"]


def test_a_document_that_time_cut_short_replaces_no_whole_one():
    whole, cut = {"busy": True, "left_out": []}, {"busy": False, "left_out": [8192]}
    assert less_cut(cut, whole) is whole
    assert less_cut(whole, cut) is whole
    assert less_cut(cut, None) is cut
    assert less_cut(cut, dict(cut)) is cut
