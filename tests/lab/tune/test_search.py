# SPDX-License-Identifier: Apache-2.0
"""The tuner's search: the budgets that it tries, the texts and tasks that decide, and its results on unseen kinds."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dynaxx as dx
from dynaxx.lab.resume import Steps
from dynaxx.lab.tasks.suite import TaskSample
from dynaxx.lab.texts import pydoc_text
from dynaxx.lab.time_budget import TimeBudget
from dynaxx.lab.tune import costing
from dynaxx.lab.tune import costs as costs_module
from dynaxx.lab.tune import search as search_module
from dynaxx.lab.tune.costs import Costs, rule_of
from dynaxx.lab.tune.density import search_texts as texts_module
from dynaxx.lab.tune.density import trials as trials_module
from dynaxx.lab.tune.density.candidates import TunedCandidates, UniformCandidates
from dynaxx.lab.tune.density.held_tasks import HeldTasks
from dynaxx.lab.tune.pipeline.result import PipelineResult
from dynaxx.lab.tune.result import HeldOutKind, TaskTrial, Trial
from dynaxx.lab.tune.run import TuneOptions, tune
from dynaxx.lab.tune.sensitivity import measure_head_costs, one_row_in
from given_times import give_prefill_times
from tiny import TEXT, save_tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    pytest.importorskip("transformers")
    from dynaxx.lab.models import load_model

    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("tiny"))), device="cpu")


@pytest.fixture
def tuned(loaded, tmp_path, monkeypatch):
    give_prefill_times(monkeypatch, [])
    given = dict(out=tmp_path, tokens=128, block_size=16, reference=False)
    return lambda **options: tune(*loaded, TEXT, TuneOptions("", **{**given, **options}))


def test_every_kind_of_text_decides(tuned, tmp_path, monkeypatch):
    found = tuned(kinds=("code", "tables"), held_out=True, tolerance=0.05)
    assert found.chosen is not None
    assert [kind.kind for kind in found.chosen.kinds] == ["sample", "code", "tables"]
    assert all(kind.passed for kind in found.chosen.kinds)
    assert found.chosen.tokens == sum(kind.tokens for kind in found.chosen.kinds) >= 3 * 128
    for each in (*found.tuned, *found.uniform):
        assert each.passed == (len(each.kinds) == 3 and all(kind.passed for kind in each.kinds))
    assert {each.kind for each in found.held_out} == {"sample", "code", "tables"}
    ratios = [each.ratio for each in found.held_out]
    assert ratios == sorted(ratios, reverse=True), "the worst first"
    values = found.policy.evidence[0].values
    assert values["perplexity_ratio on code"] == pytest.approx(found.chosen.kinds[1].ratio)
    assert "perplexity_ratio on tables, tuned without it" in values
    document = json.loads((tmp_path / "tuning.json").read_text())
    said = PipelineResult(None, None, document, None, "", ()).summary()
    assert "by kind of text: sample +" in said or "by kind of text: sample -" in said
    assert "worst kind that tuning did not see: " in said
    monkeypatch.setattr(trials_module, "token_losses", lambda *_: pytest.fail("computed twice"))
    monkeypatch.setattr(costing, "measure_head_costs", lambda *_, **__: pytest.fail("measured twice"))
    again = tuned(kinds=("code", "tables"), held_out=True, tolerance=0.05)
    assert again.chosen == found.chosen
    assert again.held_out == found.held_out


def test_leaving_out_needs_several_kinds(tuned):
    with pytest.raises(ValueError, match="--kinds all"):
        tuned(held_out=True)
    with pytest.raises(ValueError, match="no kind of text 'poems'"):
        tuned(kinds=("poems",))
    with pytest.raises(ValueError, match="no task 'poems'"):
        tuned(hold=("poems",))


def test_tasks_must_hold(tuned, monkeypatch):
    given = []

    class Fake:
        def __init__(self, model, tokenizer, text, options, remember, has_time):
            given.append((options.hold, options.tokens))
            self.tasks = options.hold

        def for_costs(self, task, number):
            ids = torch.arange(1, 120)[None] % 50
            return TaskSample(task, 128, ids, ids[:, -4:], ids[0, :5], (5,), ("",))

        def under(self, policy, key):
            rules = [group.rule for plan in dx.policy.resolve(policy).values() for group in plan.groups]
            found = [rule.selector.budget for rule in rules]
            budgets = [each for budget in found for each in (budget if isinstance(budget, tuple) else (budget,))]
            return (TaskTrial("vt", 0.3, True, sum(budgets) / len(budgets) > 0.6),)

    monkeypatch.setattr(costing, "HeldTasks", Fake)
    found = tuned(hold=("vt",), tolerance=0.9)
    assert given == [(("vt",), 128)]
    trials = (*found.tuned, *found.uniform)
    assert any(each.tasks and not each.passed and all(task.drop == 0.3 for task in each.tasks) for each in trials)
    assert found.chosen is None or found.chosen.tasks[0].passed


@pytest.mark.parametrize(("losses", "prompts", "holds"), [
    ([0.01, 0.02, 0.03], 3, True),
    ([0.3, 0.31, 0.32], 3, False),
    ([0.3, -0.1, 0.1, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0], 9, True),
    ([0.3, -0.1] * 12, 24, True),
])  # fmt: skip
def test_undecided_tasks_get_more_prompts(loaded, tmp_path, monkeypatch, losses, prompts, holds):
    from dynaxx.integrations.transformers.apply_policy import model_facts

    steps, read = Steps(tmp_path / "steps.json", "key"), []
    tasks = HeldTasks(*loaded, pydoc_text(), hold("niah_single_1"), steps.remember)

    def answers(name, part, alone):
        some = losses[3 * part : 3 * part + 3]
        read.extend([] if alone else some)
        return [(1.0 if alone else 1.0 - each, 1.0, 0.0, None) for each in some]

    monkeypatch.setattr(tasks, "_answers", answers)
    policy = dx.Policy(model=model_facts(loaded.model), block_size=16, rules=(dx.Rule.of(dx.SlidingWindow(16)),))
    (row,) = tasks.under(policy, "a")
    assert (len(read), row.passed) == (prompts, holds)
    assert row.drop == pytest.approx(sum(read) / len(read))


def hold(*tasks):
    return TuneOptions("", Path(), hold=tasks, tokens=900)


def test_trials_and_costs_have_different_prompts(loaded, tmp_path):
    steps = Steps(tmp_path / "steps.json", "key")
    tasks = HeldTasks(*loaded, pydoc_text(), hold("niah_single_1", "niah_single_2"), steps.remember)
    assert tasks.tasks == ("niah_single_1", "niah_single_2")
    prompts = [*(tasks.for_costs("niah_single_2", number) for number in (0, 1)), *tasks._prompts("niah_single_2", 0)]
    assert len({tuple(each.prompt[0].tolist()) for each in prompts}) == len(prompts)


@pytest.fixture
def small(monkeypatch):
    """Use small blocks, so that a policy has blocks to choose from at 512 tokens."""
    monkeypatch.setattr(trials_module, "LAST_QUERIES", 16)
    monkeypatch.setattr(costs_module, "LOCAL_TOKENS", 32)


def test_unknown_scorers_and_no_stretches_are_refused(tuned):
    with pytest.raises(ValueError, match="must be some of mean, bounds, tiles, got best"):
        tuned(scorers=("mean", "best"))
    with pytest.raises(ValueError, match="got none"):
        tuned(scorers=())
    with pytest.raises(ValueError, match="`stretches` must be >= 1"):
        tuned(stretches=0)


@pytest.mark.parametrize("name", costs_module.SCORERS)
def test_every_scorer_gives_a_policy(tuned, small, name):
    found = tuned(tokens=512, tolerance=0.9, scorers=(name,))
    assert found.scorer == repr(costs_module.SCORERS[name])
    assert found.chosen is not None
    assert found.chosen.density < 1
    assert len(found.tuned) <= search_module.SEARCH_STEPS, "a single scorer needs no trial of its own"
    for each in found.tuned:
        assert each.density == pytest.approx(each.aim, abs=0.005), "shares of blocks do not depend on the text"


@pytest.mark.parametrize(("lost", "expected"), [(0.0, "mean"), (0.0004, "mean"), (0.004, "bounds")])
def test_a_scorer_wins_by_prediction_unless_another_measurably_loses_less(lost, expected):
    mean, bounds = (costs_module.SCORERS[name] for name in ("mean", "bounds"))
    density = torch.tensor(costs_module.BUDGETS, dtype=torch.float64)[:, None].expand(-1, 2)
    loss = {mean: (1 - density) ** 2, bounds: 1.1 * (1 - density) ** 2}
    costs = Costs((0,), dict.fromkeys(loss, density), loss)
    noise = 0.003 * torch.linspace(-1, 1, 4096)  # runs differ, so that the standard error of the mean is 0.07 %
    losses = {mean: lost + noise, bounds: torch.zeros(4096)}
    trials = SimpleNamespace(
        pass_seconds=0.0,
        dense=lambda index: torch.zeros(4096),
        key=lambda budgets, scorer: scorer,
        policy=lambda *given: None,
        remembered=lambda scorer, policy, index: {"losses": losses[scorer].tolist()},
    )
    search = SimpleNamespace(
        trials=trials,
        texts=SimpleNamespace(search=[SimpleNamespace(kind="sample")]),
        time=TimeBudget(),
        steps=set(),
        _costs=lambda *given: costs,
        _name=str,
    )
    learned = []
    rises = SimpleNamespace(learn=lambda predicted, rows: learned.append(rows[0]))
    task = SimpleNamespace(advance=lambda *given: None)
    found = search_module.Search._best_scorer(search, [bounds, mean], rises, task)
    assert found == costs_module.SCORERS[expected]
    assert learned[0].tokens == 4096


def test_long_texts_have_finer_budgets(tuned, small, monkeypatch):
    assert costs_module.budgets_for(8192) == costs_module.BUDGETS
    assert costs_module.budgets_for(32768) == costs_module.LONG_BUDGETS
    monkeypatch.setattr(costs_module, "LONG_TEXT", 512)
    found = tuned(tokens=512, tolerance=0.9, resume=False)
    chosen = {budget for row in found.budgets for budget in row}
    assert chosen <= set(costs_module.LONG_BUDGETS)
    for each in found.tuned:
        assert each.density == pytest.approx(each.aim, abs=0.005)


def test_a_limited_search_tries_one_budget_only_where_it_could_win(tuned, small):
    options = dict(tokens=512, tolerance=0.02, resume=False)
    free, limited = tuned(**options), tuned(**options, time_budget=3600.0)
    assert limited.scorer == free.scorer
    assert limited.tuned == free.tuned
    assert len(limited.uniform) <= len(free.uniform)
    if not limited.uniform[0].passed:
        assert len(limited.uniform) == 1


def test_costs_of_several_texts_are_averaged_and_interpolated():
    scorer = dx.MeanQuery()
    density = torch.linspace(0.1, 1.0, 11, dtype=torch.float64)[:, None].expand(11, 4)
    loss = (1 - density) ** 2
    first, second = (Costs((0, 1), {scorer: each}, {scorer: loss}) for each in (density, 0.5 * density))
    assert float(Costs.mean([first, second]).density[scorer][0, 0]) == pytest.approx(0.075)
    uniform = UniformCandidates(TunedCandidates({"code": first}, scorer))
    assert uniform.at(1.0).budgets[0][0] == 1.0
    assert 0.03 < uniform.at(0.25).budgets[0][0] < 0.06
    assert rule_of(scorer, (0.5, 0.9), 32, 64, 7) == (
        dx.Sink(32) | dx.LocalBlocks(4) | dx.LastQueries(64) | dx.TopK((0.5, 0.9), dx.MeanQuery(), 7, per="head")
    )
    assert rule_of(scorer, 0.5, 128, 64, 7).pattern == dx.Sink(128) | dx.LocalBlocks(2) | dx.LastQueries(64)


def test_held_tasks_are_scored_once(loaded, tmp_path):
    from dynaxx.integrations.transformers.apply_policy import model_facts

    steps = Steps(tmp_path / "steps.json", "key")
    tasks = HeldTasks(*loaded, pydoc_text(), hold("niah_single_1"), steps.remember)
    policy = dx.Policy(model=model_facts(loaded.model), block_size=16, rules=(dx.Rule.of(dx.SlidingWindow(16)),))
    (row,) = tasks.under(policy, "a")
    assert (row.task, row.informative, row.drop, row.passed) == ("niah_single_1", False, 0.0, True)
    assert "task niah_single_1 alone 0" in steps
    assert "task niah_single_1 a 0" not in steps, "what the dense model cannot do is not asked of the policy"


def test_trials_have_up_to_three_times_the_stretches_of_costs(loaded):
    alone = texts_module.search_texts(loaded.tokenizer, TEXT, {}, 128)
    assert [len(part) for part in (alone.costs, alone.search)] == [1, 6]
    several = texts_module.search_texts(loaded.tokenizer, TEXT, {"other": TEXT[5000:]}, 128)
    assert several.kinds == ("sample", "other")
    assert [stretch.ids.shape for stretch in several.search] == [(1, 129)] * 6
    assert [stretch.kind for stretch in several.first(2)] == ["sample", "sample", "other", "other"]
    assert not torch.equal(several.costs[0].ids[:, :128], several.search[0].ids[:, :128])
    more = texts_module.search_texts(loaded.tokenizer, TEXT, {"other": TEXT}, 64, stretches=2)
    assert more.kinds == ("sample", "other")
    assert [len(part) for part in (more.costs, more.search)] == [4, 12]
    assert len({tuple(stretch.ids[0, 1:].tolist()) for stretch in (*more.costs[:2], *more.search[:2])}) == 4
    with pytest.raises(
        ValueError, match=r"the half of 'other' to tune on must have at least [\d,]+ tokens \(the whole text about "
    ):
        texts_module.search_texts(loaded.tokenizer, TEXT, {"other": TEXT[:3000]}, 900)


def test_candidates_that_no_scorer_changes_are_measured_once(loaded, monkeypatch):
    from dynaxx.lab.tune import sensitivity

    calls = []
    real = sensitivity.select_blocks
    monkeypatch.setattr(sensitivity, "select_blocks", lambda *a, **k: calls.append(1) or real(*a, **k))
    rule = lambda budget, scorer: (dx.Sink(16) | dx.LocalBlocks(1)) | dx.TopK(budget, scorer, per="head")
    candidates = [rule(b, s) for s in (dx.MeanQuery(), dx.MinMax(bound=0.5)) for b in (0.0, 0.3, 1.0)]
    ids = torch.randint(3, 300, (1, 129))
    found = measure_head_costs(loaded.model, ids, candidates, block_size=16)
    assert len(calls) == 2 * 3, "two layers, and three different sets of blocks that are not dense"
    for each in found:
        assert torch.equal(each.loss[0], each.loss[3])
        assert torch.equal(each.loss[2], each.loss[5])
        assert float(each.loss[2].max()) == 0.0


def test_costs_of_some_rows_are_those_of_their_queries(loaded):
    ids = torch.randint(3, 300, (1, 129))
    rule = (dx.Sink(16) | dx.LocalBlocks(1)) | dx.TopK(0.3, dx.MeanQuery(), per="head")
    whole, half, first = (
        measure_head_costs(loaded.model, ids, [rule], block_size=16, every=every) for every in (1, 2, 1000)
    )
    for a, b, c in zip(whole, half, first, strict=True):
        assert float(b.loss.min()) > 0
        assert not torch.equal(a.loss, b.loss)
        assert float(c.loss.max()) < 1e-12, "the first block sees itself alone"
    layout = dx.select_blocks(torch.randn(1, 128, 2, 16), torch.randn(1, 128, 2, 16), rule, block_size=16)
    rows = torch.arange(128) // 16 % 2 == 0
    some = one_row_in(2, layout).to_dense()
    assert torch.equal(some[..., rows, :], layout.to_dense()[..., rows, :])
    assert not some[..., ~rows, :].any()


def test_every_second_row_of_a_long_text_tells_the_costs(tuned, monkeypatch):
    """But not of a short one, which has few of them."""
    seen = []
    real = measure_head_costs
    monkeypatch.setattr(costing, "measure_head_costs", lambda *a, **k: seen.append(k["every"]) or real(*a, **k))
    tuned(scorers=("mean",))
    monkeypatch.setattr(costing, "MANY_ROWS", 8)
    tuned(scorers=("mean",), resume=False)
    assert seen == [1, 2]


@pytest.mark.parametrize("own", [False, True])
def test_checkpointed_layers_have_the_same_costs(loaded, monkeypatch, own):
    from dynaxx.lab.tune import sensitivity

    candidates = [(dx.Sink(16) | dx.LocalBlocks(1)) | dx.TopK(b, dx.MeanQuery(), per="head") for b in (0.0, 0.3)]
    ids = torch.randint(3, 300, (1, 129))
    expected = measure_head_costs(loaded.model, ids, candidates, block_size=16)
    runs = []
    real = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: runs.append(1) or real(*a, **k))
    monkeypatch.setattr(sensitivity, "_memory_is_scarce", lambda ids: True)
    if own:  # the user's own settings of training
        for layer in loaded.model.model.layers:
            monkeypatch.setattr(layer, "gradient_checkpointing", True)
            monkeypatch.setattr(layer, "_gradient_checkpointing_func", None, raising=False)
    before = [dict(vars(layer)) for layer in loaded.model.model.layers]
    found = measure_head_costs(loaded.model, ids, candidates, block_size=16)
    assert [dict(vars(layer)) for layer in loaded.model.model.layers] == before
    assert len(runs) == 2
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after.loss, before.loss)


def test_layers_that_checkpoints_do_not_reach_keep_their_graph(loaded, monkeypatch):
    from dynaxx.lab.tune import sensitivity

    monkeypatch.setattr(sensitivity, "_memory_is_scarce", lambda ids: True)
    monkeypatch.setattr(sensitivity, "_checkpointed", lambda model: torch.no_grad())
    candidates = [(dx.Sink(16) | dx.LocalBlocks(1)) | dx.TopK(0.0, dx.MeanQuery(), per="head")]
    found = measure_head_costs(loaded.model, torch.randint(3, 300, (1, 129)), candidates, block_size=16)
    assert all(float(each.loss.max()) > 0 for each in found)


def test_costs_of_an_answer_count_its_tokens_alone(loaded):
    ids = torch.randint(3, 300, (1, 129))
    candidates = [(dx.Sink(16) | dx.LocalBlocks(1)) | dx.TopK(0.0, dx.MeanQuery(), per="head")]
    every, most, none = (
        measure_head_costs(loaded.model, ids, candidates, block_size=16, last=last) for last in (None, 1000, 0)
    )
    assert all(torch.equal(a.loss, b.loss) for a, b in zip(every, most, strict=True))
    assert all(float(each.loss.max()) == 0.0 for each in none)


def test_kinds_that_were_not_measured_are_not_called_good():
    none = HeldOutKind("legal", None)
    assert (none.ratio, none.passed) == (None, False)
    chosen = asdict(Trial(0.3, 1.0, 1.001, 0.0, True))
    held_out = [asdict(each) for each in (HeldOutKind("code", 0.3, 1.004, 0.001, True), none)]
    document = {"chosen": chosen, "held_out": held_out, "best_uniform_density": None, "sparse_from": None}
    said = PipelineResult(None, None, document, None, "", ()).summary()
    assert "worst kind that tuning did not see: Python source code +0.40% at 30.0% of the blocks" in said
    assert "so they were not measured: licence texts" in said


def test_the_summary_says_how_far_one_budget_was_from_passing():
    chosen = {"density": 0.272, "ratio": 1.0072, "kinds": []}
    tried = [{"density": 0.2, "ratio": 1.09}, {"density": 0.25, "ratio": 1.0589}]
    tuning = {"chosen": chosen, "verdict": "sparse", "sparse_from": 512, "why": "27.2% keep it"}
    said = lambda uniform: PipelineResult(None, None, {**tuning, "uniform": uniform}, None, "", ()).summary()
    assert "tuned: 27.2% keep it\n27.2% of the blocks, perplexity +0.72%; one budget for all heads fails" in said(tried)
    assert "perplexity +5.89%" in said(tried)
    assert "one budget for all heads was not tried" in said([])
