# SPDX-License-Identifier: Apache-2.0
"""Time budgets on a simulated clock: no run says what the full run contradicts, and short runs add up to it."""

import math
import re
from functools import partial

import pytest
import torch

import dynaxx as dx
from dynaxx.lab.perplexity import PACE_TOKENS
from dynaxx.lab.progress import SilentProgress
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.tune import costing
from dynaxx.lab.tune.run import TuneOptions, tune
from slow_clock import SlowClock
from tiny import TEXT, save_tiny_model

TOKENS = 512
PACE = 4.0  # simulated seconds of the pass that a budget is sized by
CASES = {"sparse": (0.01, 0.1), "undecided": (1e-9, 0.1), "dense": (0.01, 2.0)}  # tolerance, seconds of choosing


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return a random model whose perplexity depends on what its heads see."""
    pytest.importorskip("transformers")
    from dynaxx.lab.models import load_model

    found = load_model(str(save_tiny_model(tmp_path_factory.mktemp("tiny"), max_positions=TOKENS)), device="cpu")
    with torch.no_grad():
        for name, parameter in found.model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0 if "q_proj" in name or "k_proj" in name else 5.0)
    return found


@pytest.fixture(scope="module")
def full(loaded, tmp_path_factory):
    """Return results without a time budget and the simulated seconds, by case; runs are made once."""
    found = {}

    def of(case):
        if case not in found:
            clock = clock_of(case)
            found[case] = run(loaded, tmp_path_factory.mktemp("full"), case, None, clock), clock.seconds
            assert (found[case][0].ended, found[case][0].verdict) == ("done", case)
        return found[case]

    return of


def clock_of(case, *given, **options):
    return SlowClock(*given, choosing=CASES[case][1], **options)


def run(loaded, out, case, budget, clock, reserve=0.0):
    options = TuneOptions("", out=out, tokens=TOKENS, block_size=16, tolerance=CASES[case][0], reference=False)
    time = TimeBudget(budget, clock)
    with time.reserving(lambda: reserve):
        return tune(*loaded, TEXT, options, time=time)


def check(found, full):
    """Check what a run says against the full run."""
    passed = found.chosen is not None and all(
        math.log(row.ratio) + 2 * row.error <= math.log1p(found.tolerance) for row in found.chosen.rows
    )
    assert bool(found.policy.rules) == (found.verdict == "sparse")
    if found.verdict == "sparse":
        assert passed, "a written policy passes its tolerance"
        assert full.verdict == "sparse"
        assert found.sparse_from <= TOKENS
        assert found.policy.sparse_from <= TOKENS, "it runs sparse where it was tuned"
    if found.verdict == "dense":
        assert full.verdict == "dense"
    if found.verdict == "undecided":
        assert found.why
        assert found.advice
    values = found.policy.evidence[0].values
    assert (values["verdict"], values["ended"]) == (found.verdict, found.ended)


@pytest.mark.parametrize("slowness", [1.0, slow(3.0), slow(10.0), 30.0])
@pytest.mark.parametrize("case", CASES)
def test_no_budget_contradicts_the_full_run(loaded, full, tmp_path, slowness, case):
    expected, seconds = full(case)
    for number, budget in enumerate((10.0, 0.15 * slowness * seconds, 0.6 * slowness * seconds)):
        clock = clock_of(case, slowness, noise=0.1, seed=number)
        found = run(loaded, tmp_path / str(number), case, budget, clock)
        check(found, expected)
        assert clock.seconds <= max(1.2 * budget, 1.2 * slowness * PACE), "at most a fifth late"


@pytest.mark.parametrize("slowness", [1.0, slow(3.0)])
def test_a_search_without_a_policy_may_use_the_time_of_the_validation(loaded, tmp_path, slowness):
    clock = SlowClock(slowness)
    found = run(loaded, tmp_path, "sparse", 120.0 * slowness, clock, reserve=25.0 * slowness)
    assert found.verdict == "sparse"
    assert clock.seconds <= 120.0 * slowness


@pytest.mark.parametrize("case", CASES)
def test_twice_the_time_of_the_full_run_is_enough(loaded, full, tmp_path, case):
    expected, seconds = full(case)
    found = run(loaded, tmp_path, case, 6.0 * seconds, clock_of(case, 3.0, noise=0.1))
    check(found, expected)
    assert (found.ended, found.verdict) == ("done", expected.verdict)
    assert bool(found.uniform) == bool(expected.uniform), "it tries what the full run tries"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [slow(0.15), 0.35])
def test_short_runs_add_up_to_the_full_result(loaded, full, tmp_path, share, case):
    """Also if the machine is faster or slower each time; seconds count as on the machine of the full run."""
    expected, seconds = full(case)
    spent, densities = 0.0, []
    for number in range(30):
        slowness = (1.0, 10.0, 3.0, 30.0)[number % 4]
        clock = clock_of(case, slowness, noise=0.1, seed=number)
        found = run(loaded, tmp_path, case, share * slowness * seconds, clock)
        check(found, expected)
        spent += clock.seconds / slowness
        densities += [found.chosen.density] if found.chosen else []
        if found.ended == "done":
            break
    assert (found.ended, found.verdict) == ("done", expected.verdict)
    assert spent <= 1.3 * seconds
    assert densities == sorted(densities, reverse=True), "a later run is never denser"
    if expected.chosen is not None and found.scorer == expected.scorer:
        assert found.chosen.density <= 1.03 * expected.chosen.density


@pytest.mark.parametrize("stop_at", [5.0, 90.0])
def test_an_interrupted_run_says_so_and_continues(loaded, full, tmp_path, stop_at):
    expected, _ = full("sparse")
    found = run(loaded, tmp_path, "sparse", None, SlowClock(stop_at=stop_at))
    assert (found.ended, found.verdict) == ("interrupted", "undecided")
    assert found.policy.rules == ()
    assert dx.load_policy(tmp_path / "policy.json") == found.policy
    again = run(loaded, tmp_path, "sparse", None, SlowClock())
    assert (again.ended, again.verdict) == ("done", "sparse")
    assert again.chosen.density <= 1.03 * expected.chosen.density
    kept = run(loaded, tmp_path, "sparse", 0.01, SlowClock())
    assert kept.policy.rules == again.policy.rules, "a run without time keeps what others found"


def test_what_a_busy_machine_timed_is_timed_again(loaded, tmp_path):
    again = partial(run, loaded, tmp_path, "sparse", None)
    busy = again(SlowClock(busy=True))
    assert busy.busy
    assert busy.policy.evidence[0].values["busy"]
    quiet = SlowClock()
    found = again(quiet)
    assert not found.busy
    assert {kind for kind, _ in quiet.done} == {"attention", "crossover"}, "only the timing is repeated"
    assert again(still := SlowClock()).crossover == found.crossover
    assert still.done == []


def test_what_other_threads_timed_is_timed_again(loaded, tmp_path, monkeypatch):
    run(loaded, tmp_path, "sparse", None, SlowClock())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    run(loaded, tmp_path, "sparse", None, clock := SlowClock())
    assert {kind for kind, _ in clock.done} == {"attention", "crossover"}


def test_an_advised_budget_has_room_for_the_start_of_the_command(loaded, tmp_path):
    options = TuneOptions("", out=tmp_path, tokens=TOKENS, block_size=16, reference=False)
    found = tune(*loaded, TEXT, options, time=TimeBudget(10.0, SlowClock(), spent=2000.0))
    assert (found.ended, found.verdict) == ("time", "undecided")
    assert "--time-budget 1h" in found.advice


def test_every_stretch_of_a_trial_is_said(loaded, tmp_path):
    said = []
    given = dict(out=tmp_path, tokens=TOKENS, block_size=16, tolerance=1e-9, reference=False)

    class Notes(SilentProgress):
        def advance(self, n=1, note=""):
            said.append(note)

    tune(*loaded, TEXT, TuneOptions("", **given), progress=Notes(), time=TimeBudget(120.0, SlowClock()))
    assert any(re.fullmatch(r"trying .* of the blocks, tuned; sample: .*% on 512 tokens", each) for each in said)


def test_a_dense_policy_is_not_timed(loaded, full, tmp_path):
    found = run(loaded, tmp_path, "undecided", None, clock := SlowClock())
    assert found.crossover == ()
    assert "attention" not in {kind for kind, _ in clock.done}


def test_a_whole_pass_decides_how_much_text_costs_take(loaded, tmp_path, monkeypatch):
    """The pace of a few tokens is known first, and may promise passes that are much too long."""
    seen = []
    real = costing.measure_head_costs
    monkeypatch.setattr(
        costing,
        "measure_head_costs",
        lambda model, ids, *a, **k: seen.append(ids.shape[1] - 1) or real(model, ids, *a, **k),
    )
    options = TuneOptions("", out=tmp_path, tokens=TOKENS, block_size=16, scorers=("mean",), reference=False)
    time = TimeBudget(600.0)
    time.learn(PASS, PACE_TOKENS, 5.0)
    tune(*loaded, TEXT, options, time=time)
    assert seen == [TOKENS]
