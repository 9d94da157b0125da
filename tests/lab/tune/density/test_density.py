# SPDX-License-Identifier: Apache-2.0
"""Which density passes: the next density to try, weights for kinds of text, and how much text decides."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import dynaxx as dx
from dynaxx.lab.resume import Steps
from dynaxx.lab.time_budget import TimeBudget
from dynaxx.lab.tune.costs import BUDGETS, Costs
from dynaxx.lab.tune.density.candidates import Candidate, TunedCandidates, UniformCandidates
from dynaxx.lab.tune.density.guide import Guide
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.density.search_texts import SearchTexts, Stretch
from dynaxx.lab.tune.density.trials import Trials, rise_of
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.result import KindTrial, Trial
from slow_clock import SlowClock

FINE, LEAST = 1.1, 0.05
SCORER = dx.MeanQuery()


class Curve:
    """Candidates whose predicted loss is a function of the density."""

    least = LEAST

    def __init__(self, predicted):
        self.predicted = predicted

    def at(self, density):
        return Candidate(density, [[density]], {"sample": self.predicted(density)})


def searched(predicted, real, tolerance=0.01):
    """Search as the tuner does; return the sparsest density that passed and the densities that were tried."""
    guide = Guide(Curve(predicted), Rises(tolerance, 2, {"sample": 1000}), FINE)
    tried = []

    def evaluate(candidate):
        failed, passed = guide.bounds()
        assert (failed or 0) < candidate.aim < passed
        tried.append(candidate.aim)
        rise = real(candidate.aim)
        return Trial(candidate.aim, 1.0, math.exp(rise), 1e-6, math.exp(rise) <= 1 + tolerance, 1000)

    guide.run(evaluate, 12)
    return (guide.best.candidate.aim if guide.best else 1.0), tried


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_a_guide_finds_the_density_in_few_trials(factor):
    predicted = lambda density: 0.002 / density**2
    real = lambda density: factor * predicted(density)
    right = math.sqrt(factor * 0.002 / math.log(1.01))
    found, tried = searched(predicted, real)
    assert right <= found <= min(1.0, right * FINE)
    assert len(tried) <= 5


def test_a_guide_survives_wrong_predictions():
    found, tried = searched(lambda density: 0.01, lambda density: 0.002 / density)
    assert found / (0.002 / math.log(1.01)) < FINE * 1.01
    assert len(tried) <= 11
    assert searched(lambda density: 0.0, lambda density: -0.1)[0] < 0.06, "nothing is lost at any density"
    assert searched(lambda density: 1.0, lambda density: 1.0)[0] == 1.0, "everything fails"


def test_one_noisy_kind_is_pulled_to_what_all_kinds_say():
    rises = Rises(0.01, 2, {"code": 1000, "legal": 1000})
    predicted = {"code": 0.004, "legal": 0.004}
    assert rises.upper(predicted) == pytest.approx(predicted), "a factor of 1 and no errors before any trial"
    rises.learn(predicted, [KindTrial("legal", math.exp(0.008), 1e-5, False, 1000)])
    rises.learn(predicted, [KindTrial("code", math.exp(-0.004), 0.01, True, 1000)])
    upper = rises.upper(predicted)
    assert upper["legal"] == pytest.approx(0.008, rel=0.1)
    assert 0.004 < rises.upper({"code": 0.004})["code"] - 2 * 0.01 < 0.008, "its own trial is too noisy to count"
    assert set(rises.without("legal")._points) == {"code"}
    twice = Rises(0.01, 2, {"legal": 4000})
    twice.learn({"legal": 0.004}, [KindTrial("legal", 1.0, 0.001, True, 1000)])
    assert twice._error("legal", 0.004) == pytest.approx(0.0005), "four times the tokens, half the error"


def costs_of(losses):
    """Return costs of two heads in one layer; `losses` are those without any block."""
    values = torch.tensor(BUDGETS, dtype=torch.float64)
    loss = torch.tensor(losses, dtype=torch.float64) * (1 - values[:, None]) ** 4
    return Costs((0,), {SCORER: values[:, None].expand(-1, 2)}, {SCORER: loss})


def test_budgets_suit_texts_and_tasks_and_predict_the_loss_of_each_kind():
    costs = {"code": costs_of([0.02, 0.0]), "legal": costs_of([0.0, 0.01])}
    found = TunedCandidates(costs, SCORER).at(0.2)
    (row,) = found.budgets
    assert found.aim <= 0.2
    assert row[0] > row[1], "code has the larger loss"
    for place, kind in enumerate(costs):
        each = costs[kind].finer(SCORER)
        assert found.predicted[kind] == pytest.approx(float(each.loss[SCORER][each.values.index(row[place]), place]))
    (with_tasks,) = TunedCandidates(costs, SCORER, costs_of([0.0, 5.0])).at(0.2).budgets
    assert with_tasks[0] < row[0], "the tasks need the other head"
    assert with_tasks[1] > row[1]
    uniform = UniformCandidates(TunedCandidates(costs, SCORER)).at(0.3)
    assert uniform.budgets == [[pytest.approx(0.3)] * 2]
    fine = costs["code"].finer(SCORER)
    assert uniform.predicted["code"] == pytest.approx(float(fine.loss[SCORER][fine.values.index(0.3)].sum()))


def test_steps_grow_while_everything_fails():
    guide = Guide(Curve(lambda density: 1e-6), Rises(0.01, 2, {"sample": 1000}), 1.03)
    guide.run(lambda candidate: Trial(candidate.aim, 1.0, 1.01, 1e-4, False, 1000), 5, start=0.2)
    aims = [each.candidate.aim for each in guide.tried]
    ratios = [b / a for a, b in pairwise(aims)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 1.031
    assert aims[-1] < 0.7
    assert guide.best is None


def test_trials_that_an_earlier_run_left_undecided_are_decided_one_by_one():
    curve = Curve(lambda density: 0.002 / density**2)
    guide = Guide(curve, Rises(0.01, 2, {"sample": 1000}), FINE)
    trial = lambda density, decided: Trial(
        density, 1.0, math.exp(curve.predicted(density)), 1e-6, decided and density > 0.45, 1000, decided=decided
    )
    for density in (0.3, 0.9, 0.6):
        guide.learn(curve.at(density), trial(density, False))
    tried = []

    def evaluate(candidate):
        tried.append(candidate.aim)
        return trial(candidate.aim, True)

    guide.run(evaluate, 12)
    assert tried[:2] == [0.6, 0.3], "the denser one matters no more"
    assert guide.unsettled == []
    assert guide.is_done()


def test_densities_beyond_an_undecided_one_are_next():
    guide = Guide(Curve(lambda density: 0.002 / density**2), Rises(0.01, 2, {"sample": 1000}), FINE, first=0.6)
    tried = []

    def evaluate(candidate):
        tried.append(candidate.aim)
        decided = not 0.4 < candidate.aim < 0.5
        return Trial(candidate.aim, 1.0, 1.0, 1e-3, decided and candidate.aim > 0.45, 1000, decided=decided)

    guide.run(evaluate, 12)
    undecided = [each.candidate.aim for each in guide.unsettled]
    assert undecided
    assert len(tried) == len(set(tried)), "no candidate twice"
    assert 0.5 <= guide.best.candidate.aim < FINE * max(undecided)
    assert not guide.is_done(), "what is undecided has not failed"
    stuck = Guide(Curve(lambda density: 1.0), Rises(0.01, 2, {"sample": 1000}), FINE)
    stuck.run(lambda candidate: Trial(candidate.aim, 1.0, 1.0, 1e-3, False, 1000, decided=False), 12)
    assert len(stuck.tried) == 1, "while nothing passes, one at a time"
    assert not stuck.hopeless


def test_interpolated_budgets_lie_between_measured_ones():
    costs = costs_of([0.02, 0.01])
    fine = costs.finer(SCORER)
    assert set(BUDGETS) <= set(fine.values)
    assert list(fine.values) == sorted(set(fine.values))
    assert fine.density[SCORER][:, 0].tolist() == pytest.approx(list(fine.values), abs=1e-4)
    assert (fine.loss[SCORER].diff(dim=0) <= 0).all()
    for index, value in enumerate(BUDGETS):
        torch.testing.assert_close(fine.loss[SCORER][fine.values.index(value)], costs.loss[SCORER][index])


def test_neighbouring_tokens_are_one_observation():
    torch.manual_seed(0)
    apart = torch.randn(8192, dtype=torch.float64)
    rise = rise_of([apart])
    assert rise.mean == pytest.approx(float(apart.mean()))
    assert rise.error(1) == pytest.approx(1 / 8192**0.5, rel=0.5)
    assert rise.error(4) == pytest.approx(rise.error(1) / 2)
    together = torch.randn(16, dtype=torch.float64).repeat_interleave(512)
    assert rise_of([together]).error(1) == pytest.approx(float(together.std()) / 4, rel=0.1)
    assert rise_of([apart[:8], apart[8:16]]).error(2) < math.inf
    assert rise_of([apart[:1]]).error(1) == math.inf, "one observation says nothing about the error"


def test_a_trial_beside_one_with_more_text_has_nearly_its_error():
    """The mean is right on average, and within twice its error as often as chance says."""
    torch.manual_seed(0)
    means, errors = [], []
    for _ in range(500):
        runs = 0.5 + torch.randn(6, 8, dtype=torch.float64)
        other = [row.repeat_interleave(512) for row in runs]
        changes = [(row + 0.1 + 0.2 * torch.randn(8, dtype=torch.float64)).repeat_interleave(512) for row in runs[:1]]
        rise = rise_of(changes, other)
        means.append(rise.mean)
        errors.append(rise.error(1))
    off, errors = torch.tensor(means) - 0.6, torch.tensor(errors)
    assert float(off.mean().abs()) < 0.03
    assert float(errors.mean()) == pytest.approx(float(off.std()), rel=0.1)
    assert float(errors.mean()) < 0.5 * 8**-0.5, "the text alone has an error of 0.35"
    assert float((off.abs() < 2 * errors).double().mean()) > 0.9
    alone = rise_of(other, changes)
    assert (alone.mean, alone.error(6)) == (rise_of(other).mean, rise_of(other).error(6)), "only more text helps"


class Fixed(Trials):
    """Trials of given rises: a mean and a deviation for each stretch, in order."""

    def __init__(self, kinds, rises, tokens=512, time=None):
        stretches = tuple(Stretch(kind, torch.zeros(1, tokens + 1)) for kind in kinds)
        options = TuneOptions("", Path(), tokens=tokens, block_size=16, tolerance=0.01)
        super().__init__(None, SearchTexts(stretches, stretches), Steps(None), options, None, time)
        self.rises, self.seen = rises, []

    def policy(self, *_):
        return None

    def key(self, *_):
        return ""

    def remembered(self, key, policy, index):
        losses = torch.zeros(512)
        if key != "dense text":
            self.seen.append(index)
            mean, deviation = self.rises[index]
            losses = mean + deviation * torch.tensor([-1.0, 1.0]).repeat_interleave(64).repeat(4)
        return {"losses": losses.tolist(), "density": 0.2}

    def trial(self, **options):
        return self.evaluate(0.2, [[0.2]], [0], SCORER, **options)


def test_more_text_is_read_only_where_the_result_is_undecided():
    kinds = ["code"] * 4 + ["legal"] * 4
    trials = Fixed(kinds, [(0.0, 0.001)] * 4 + [(0.0084, 0.004)] * 4)
    found = trials.trial()
    assert trials.seen == [0, 4, 5, 6, 7]
    assert [row.tokens for row in found.kinds] == [512, 2048]
    assert [row.passed for row in found.kinds] == [True, True], "0.84 % and twice 0.07 % with all of its text"
    assert found.passed
    assert found.ratio == pytest.approx(math.exp(0.0042), rel=1e-4), "kinds count alike"
    trials.seen.clear()
    assert trials.trial(kinds=["code"]).tokens == 512
    assert trials.seen == [0]


def test_the_worst_kind_comes_first_and_ends_a_trial():
    kinds = ["code"] * 2 + ["legal"] * 2
    trials = Fixed(kinds, [(0.0, 0.001)] * 2 + [(0.012, 0.0001)] * 2)
    trials.closeness = {"legal": 0.01}
    found = trials.trial()
    assert trials.seen == [2], "clear after one stretch"
    assert (found.passed, [row.kind for row in found.kinds]) == (False, ["legal"])
    undecided = Fixed(kinds, [(0.0, 0.001)] * 2 + [(0.0085, 0.004)] * 2)
    found = undecided.trial()
    assert undecided.seen == [0, 2, 3]
    assert [row.passed for row in found.kinds] == [True, False], "undecided at the end of the text does not pass"
    late = Fixed(kinds, [(0.0, 0.001)] * 2 + [(0.0085, 0.004)] * 2, time=TimeBudget(0.0))
    found = late.trial()
    assert late.seen == [0], "without time, one stretch is read"
    assert (found.passed, found.decided) == (False, False)
    assert late.trial(stored=True) is None
    hopeless = Fixed(kinds, [(0.012, 0.004)] * 2 + [(0.0, 0.0)] * 2)
    found = hopeless.trial()
    assert (hopeless.seen, found.passed, found.decided) == ([0], False, True), "more text would hardly let it pass"


def test_a_trial_ends_where_the_rest_of_its_text_could_hardly_let_it_pass():
    of = lambda mean, **options: Fixed(["sample"] * 6, [(mean, 0.004)] * 6, **options)
    trials = of(0.0095)  # standard errors of 0.14 % after one stretch, and 0.06 % after all
    found = trials.trial()
    assert (trials.seen, found.passed, found.decided) == ([0, 1, 2, 3, 4], False, True), "all: 0.95 % and twice 0.06 %"
    assert trials.trial(densest=True).tokens == 6 * 512, "a failure that ends the search is clear, or has all its text"
    assert of(0.008).trial().passed
    short = TimeBudget(10.0, SlowClock())
    short.learn("pass", 512, 4.0)  # one more stretch fits, dense and sparse
    late = of(0.0095, time=short)
    found = late.trial(late=True)
    assert (late.seen, found.passed, found.decided) == ([0], False, False), "its time is for another trial"
    assert late.trial(stored=True) is None
    assert of(0.008, time=short).trial(late=True).tokens > 512, "one more stretch could decide it"


def test_a_trial_near_one_with_all_text_needs_little_of_it():
    rises = [(mean, 0.004) for mean in (0.0095, 0.007, 0.0075, 0.0085, 0.0065, 0.008)]
    alone, beside = Fixed(["sample"] * 6, rises), Fixed(["sample"] * 6, rises)
    for index in range(6):
        for key, (mean, deviation) in (("dense text", (0.0, 0.0)), ("trial near", rises[index])):
            found = Fixed([], [(0.95 * mean, deviation)] * 6).remembered(key, None, index)
            beside.steps.store(f"{key} {index}", found)
    found = beside.trial()
    assert (found.passed, found.decided, len(alone.seen), beside.seen) == (True, True, 0, [0])
    whole = alone.trial(densest=True)
    assert whole.tokens >= 5 * 512
    assert found.ratio == pytest.approx(whole.ratio, abs=0.0003), "its first stretch alone says 0.95 %"
    assert found.error < 1.1 * whole.error


def test_no_rise_is_clear_at_once():
    trials = Fixed(["sample"] * 2, [(0.0, 0.0)] * 2)
    assert trials.trial().passed
    assert trials.seen == [0]
