# SPDX-License-Identifier: Apache-2.0
"""The tuner's parts: allocation against brute force, costs against measured divergence, resuming after a kill."""

import copy
import dataclasses
import itertools
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import dynaxx as dx
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.time_budget import TimeBudget
from dynaxx.lab.tune import decode as decode_module
from dynaxx.lab.tune import retune as retune_module
from dynaxx.lab.tune import search as search_module
from dynaxx.lab.tune.costs import Allocator, lower_hull
from dynaxx.lab.tune.crossover import LengthTiming, dense_below, lengths_of, time_lengths, within
from dynaxx.lab.tune.density import trials as trials_module
from dynaxx.lab.tune.run import TuneOptions, tune
from dynaxx.policy.resolve import resolve_decode
from given_times import give_prefill_times, give_step_times, twice_as_fast
from slow_clock import SlowClock
from tiny import TEXT, save_tiny_model


def test_hull_keeps_only_points_that_pay():
    assert lower_hull([0, 1, 2, 3], [10, 9, 2, 1]) == [0, 2, 3]
    assert lower_hull([0, 0, 1], [5, 4, 4]) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_allocation_is_optimal_at_its_own_density(seed):
    torch.manual_seed(seed)
    density = torch.rand(4, 5, dtype=torch.float64).sort(0).values
    loss = torch.rand(4, 5, dtype=torch.float64).sort(0, descending=True).values
    found = Allocator(density, loss).at(0.5)
    best = min(
        float(loss[list(choice), range(5)].sum())
        for choice in itertools.product(range(4), repeat=5)
        if float(density[list(choice), range(5)].mean()) <= found.density + 1e-9
    )
    assert found.loss == pytest.approx(best)
    assert found.loss == pytest.approx(float(loss[found.choice, range(5)].sum()))
    assert found.density == pytest.approx(float(density[found.choice, range(5)].mean()))


def test_steps_survive_a_kill_and_refuse_another_key(tmp_path, caplog):
    path = tmp_path / "state.json"
    assert Steps(path, "a").remember("x", lambda: [1, 2]) == [1, 2]
    again = Steps(path, "a")
    assert again.remember("x", lambda: pytest.fail("computed twice")) == [1, 2]
    assert "x" not in Steps(path, "b")
    assert "starting over" in caplog.text
    path.write_text(path.read_text()[:20])
    assert "x" not in Steps(path, "a")
    assert "x" not in Steps(tmp_path / "none.json", "a")
    Steps(path, "a").remember("y", lambda: 1)
    assert "y" in Steps(path, "a")
    assert "x" not in Steps(path, "a")


def test_a_step_that_a_kill_cut_off_is_done_again(tmp_path, caplog):
    path = tmp_path / "state.jsonl"
    steps = Steps(path, "a")
    for name in "xyz":
        steps.remember(name, lambda name=name: [name])
    whole = path.read_bytes()
    assert whole.count(b"\n") == 4
    path.write_bytes(whole[:-9])
    again = Steps(path, "a")
    assert ["x" in again, "y" in again, "z" in again] == [True, True, False]
    assert "from line 4 on" in caplog.text
    assert again.remember("z", lambda: "new") == "new"
    found = Steps(path, "a")
    assert [found.remember(name, lambda: pytest.fail("computed twice")) for name in "xyz"] == [["x"], ["y"], "new"]
    path.write_bytes(whole[:-1])  # a whole step without its end of line
    last = Steps(path, "a")
    assert last.remember("z", lambda: pytest.fail("computed twice")) == ["z"]
    last.remember("w", lambda: 4)
    assert Steps(path, "a").remember("w", lambda: pytest.fail("not stored")) == 4


def test_steps_of_an_earlier_version_are_refused_by_name(tmp_path, caplog):
    (tmp_path / "state.json").write_text(json.dumps({"key": "a", "seconds": 1.0, "results": {"x": 1}, "digest": ""}))
    assert "x" not in Steps(tmp_path / "state.json", "a")
    assert "state.json cannot be read, or is of another version of dynaxx; starting over" in caplog.text
    caplog.clear()
    assert "x" not in Steps(tmp_path / "state.jsonl", "a")
    assert "state.json was written by another version of dynaxx; starting over" in caplog.text


def test_fingerprint_sees_weights_and_settings():
    model = torch.nn.Linear(4, 4)
    ids = torch.arange(5)
    first = fingerprint(model, ids, seed=0)
    assert first == fingerprint(model, ids, seed=0)
    assert first != fingerprint(model, ids, seed=1)
    assert first != fingerprint(torch.nn.Linear(4, 4), ids, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_sees_every_weight_and_buffer(dtype):
    model = torch.nn.BatchNorm1d(5000).to(dtype)
    ids = torch.arange(5)
    first = fingerprint(model, ids)
    for tensor in (model.weight, model.running_var):
        for at in (1, 17, 4999):
            with torch.no_grad():
                before = tensor[at].clone()
                tensor[at] = before * 1.01
                assert fingerprint(model, ids) != first
                tensor[at] = before
    assert fingerprint(model, ids) == first


def test_fingerprint_is_the_same_in_every_version_of_transformers():
    class Model(torch.nn.Linear):
        def __init__(self, version, derived):
            super().__init__(2, 2)
            facts = {"layers": 2, "transformers_version": version, "_name_or_path": version}
            self.config = SimpleNamespace(to_dict=lambda: facts)
            self.register_buffer("inv_freq", torch.tensor([derived]), persistent=False)
            torch.nn.init.ones_(self.weight)
            torch.nn.init.zeros_(self.bias)

    ids = torch.arange(5)
    first, second = Model("5.17.0", 1.0), Model("5.24.0", 1.0000001)
    assert fingerprint(first, ids) == fingerprint(second, ids)
    second.config.to_dict()["layers"] = 3
    assert fingerprint(first, ids) != fingerprint(second, ids)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(seconds="x"),
        lambda found: found.update(result=[]),
        lambda found: found.update(name="y"),
        lambda found: found.pop("digest"),
    ],
)
def test_steps_that_somebody_changed_are_done_again(change, tmp_path, caplog):
    path = tmp_path / "state.json"
    Steps(path, "a").remember("x", lambda: [1, 2])
    head, line, _ = path.read_text().split("\n")
    found = json.loads(line)
    change(found)
    path.write_text(f"{head}\n{json.dumps(found)}\n")
    steps = Steps(path, "a")
    assert ["x" in steps, "y" in steps] == [False, False]
    assert "cannot be read from line 2 on" in caplog.text


def test_dense_below_is_where_sparse_stays_faster():
    timings = [LengthTiming(64, 1, 2), LengthTiming(128, 3, 1), LengthTiming(256, 4, 5), LengthTiming(512, 9, 5)]
    assert dense_below(timings) == 512
    assert dense_below(timings[:3]) is None


def test_lengths_are_timed_up_to_the_context():
    assert within((64, 128, 256), 2**31) == [64, 128, 256]
    assert within((64, 128, 256), 256) == [64, 128, 256]
    assert within((64, 128, 256), 200) == [64, 128, 200]
    assert within((64, 128, 256), 32) == [32]


def tuned(model, tokenizer, text, time=None, **options):
    return tune(model, tokenizer, text, TuneOptions("", **options), time=time)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    pytest.importorskip("transformers")
    from dynaxx.lab.models import load_model

    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("tiny"))), device="cpu")


def test_a_tuned_policy_knows_its_traffic_and_is_watched(loaded, tmp_path, monkeypatch):
    give_prefill_times(monkeypatch, twice_as_fast(64, 256))
    run = partial(tuned, *loaded, TEXT, out=tmp_path, tokens=256, block_size=16, tolerance=0.5)
    found = run()
    policy = dx.load_policy(tmp_path / "policy.json")
    assert policy == found.policy
    assert policy.guard == dx.policy.Guard()
    assert [each.layer for each in policy.reference.layers] == [0, 1]
    assert {each.calls for each in policy.reference.layers} == {policy.reference.requests}
    assert retune_module.MIN_REQUESTS <= policy.reference.requests <= retune_module.REQUESTS
    assert policy.reference.policy == dx.policy.rules_digest(policy)
    assert json.loads((tmp_path / "tuning.json").read_text())["reference"] == found.reference
    with dx.apply(loaded.model, policy.replace(guard={"sample": 1.0})) as handle:
        loaded.model(torch.randint(0, 300, (1, 300)))
        handle.wait()
        assert handle.statistics() is not None
        assert handle.drift() == []
    monkeypatch.setattr(search_module, "record", lambda *_, **__: pytest.fail("recorded twice"))
    assert run().policy.reference == policy.reference
    assert run(time_budget=1e-6).policy.reference == policy.reference, "what is stored takes no time"
    without = run(reference=False)
    assert without.policy.reference is None
    assert without.policy.guard is None


def test_one_budget_for_all_heads_wins_where_it_is_sparser(loaded, tmp_path, monkeypatch):
    give_prefill_times(monkeypatch, [])
    real = trials_module.Trials.evaluate

    def evaluate(self, density, budgets, layers, scorer, **options):
        trial = real(self, density, budgets, layers, scorer, **options)
        if trial is None:
            return None
        uniform = len({budget for row in budgets for budget in row}) == 1
        return dataclasses.replace(trial, passed=uniform)

    monkeypatch.setattr(trials_module.Trials, "evaluate", evaluate)
    run = partial(tuned, *loaded, TEXT, out=tmp_path, tokens=256, block_size=16, reference=False)
    found = run(tolerance=0.5)
    assert found.chosen.density == found.best_uniform_density
    assert len({budget for row in found.budgets for budget in row}) == 1


@pytest.mark.parametrize("budget", [300.0, 100.0, 40.0, 10.0])
def test_a_time_budget_is_held_on_a_slow_machine(loaded, tmp_path, budget):
    clock = SlowClock()
    options = dict(out=tmp_path, tokens=256, block_size=16, tolerance=0.5, reference=False)
    found = tuned(*loaded, TEXT, **options, time=TimeBudget(budget, clock))
    assert clock.seconds <= 1.2 * budget
    assert found.verdict in ("sparse", "undecided")
    assert bool(found.policy.rules) == (found.verdict == "sparse")
    if found.verdict == "undecided":
        assert "--time-budget" in found.advice
    assert dx.load_policy(tmp_path / "policy.json") == found.policy


def test_a_model_is_timed_within_its_context(loaded):
    from dynaxx.integrations.transformers.apply_policy import model_facts

    policy = dx.Policy(model=model_facts(loaded.model), block_size=16, rules=(dx.Rule.of(dx.SlidingWindow(16)),))
    lengths = lengths_of(loaded.model, 300)
    assert lengths == [300, 256, 128, 64, 512, 1024], "the tuned length first"
    found = [*time_lengths(loaded.model, policy, lengths)]
    assert [each.seqlen for each in found] == lengths
    assert all(each.low <= each.high for each in found)
    assert [*time_lengths(loaded.model, policy.replace(rules=()), lengths)] == []


def test_a_text_too_short_for_a_reference_is_said(loaded, tmp_path, monkeypatch):
    give_prefill_times(monkeypatch, twice_as_fast(900))
    found = tuned(*loaded, TEXT, out=tmp_path, tokens=1024, block_size=16, tolerance=0.5)
    assert found.policy.rules
    assert found.policy.reference is None
    assert (found.policy.dense_below, found.policy.sparse_from) == (900, 1024)  # the tuned length runs sparse
    assert found.reference.startswith("none: lengths must be from 1,024")


def test_lengths_that_were_not_tuned_do_not_run_sparse(loaded, tmp_path, monkeypatch):
    give_prefill_times(monkeypatch, twice_as_fast(640, 900))
    found = tuned(*loaded, TEXT, out=tmp_path, tokens=256, block_size=16, tolerance=0.5)
    assert (found.verdict, found.policy.rules) == ("undecided", ())
    assert "tuned at 256 tokens" in found.why
    assert "--tokens 640" in found.advice


@pytest.mark.slow
def test_decode_rules_are_written_where_they_keep_quality_and_pay(loaded, tmp_path, monkeypatch):
    fast = [LengthTiming(n, 2.0, 3.0 if n < 256 else 1.0) for n in (128, 256, 512)]
    give_prefill_times(monkeypatch, [])
    give_step_times(monkeypatch, fast)
    monkeypatch.setattr(decode_module, "WINDOW", 16)
    run = partial(tuned, *loaded, TEXT, tokens=256, block_size=16, decode=True)
    found = run(out=tmp_path / "a", tolerance=0.9)
    policy = dx.load_policy(tmp_path / "a" / "policy.json")
    assert policy == found.policy
    assert {rule.phase for rule in policy.rules} == {"decode"}  # prompts are not faster here
    plans = resolve_decode(policy)
    assert [plans[layer].budget.budgets for layer in (0, 1)] == [
        row if len(set(row)) > 1 else row[:1] for row in found.decode.shares
    ]
    assert policy.decode_borders == (256, None)
    assert found.decode.share == min(decode_module.SHARES)
    assert found.reference == "none: prompts run dense"
    assert json.loads((tmp_path / "a" / "tuning.json").read_text())["decode"]["said"] == found.decode.said
    with dx.apply(loaded.model, policy) as handle:
        loaded.model.generate(torch.randint(3, 300, (1, 253)), max_new_tokens=6, do_sample=False, eos_token_id=None)
        stats = handle.stats()
    assert stats["dense_calls"]["below dense_below"] == 2 * 2  # 254 and 255 keys
    assert stats["sparse_calls"] == 2 * 3
    with pytest.raises(ValueError, match="--decode"):
        run(out=tmp_path / "d", decode=False, page_size=8)
    with pytest.raises(ValueError, match="`block_size` must be one of"):
        run(out=tmp_path / "d", page_size=4)
    assert run(out=tmp_path / "b", tolerance=1e-9).decode.said.startswith("no rule: no share")
    give_step_times(monkeypatch, [LengthTiming(n, 1.0, 1.0) for n in (128, 256)])
    slow = run(out=tmp_path / "c", tolerance=0.9)
    assert "not faster" in slow.decode.said
    assert slow.policy.rules == ()


def test_blocks_may_have_more_queries_than_keys(loaded, tmp_path, monkeypatch):
    give_prefill_times(monkeypatch, twice_as_fast(64, 256))
    run = partial(tuned, *loaded, TEXT, out=tmp_path, tokens=256, tolerance=0.5, reference=False)
    give_step_times(monkeypatch, twice_as_fast(64, 256))
    monkeypatch.setattr(decode_module, "SHARES", (0.5,))
    found = run(block_size=(32, 16), decode=True, page_size=8)
    assert found.chosen is not None
    for layer in (0, 1):
        rule = next(rule for rule in found.policy.rules if rule.phase == "prefill" and layer in rule.layer_list(2))
        pattern = rule.attention.build().pattern
        assert pattern.layout(256, block_size=(32, 16)).density() < 1
    assert found.policy.block_size == (32, 16)
    assert {rule.block_size for rule in found.policy.rules if rule.phase == "decode"} == {8}
    with dx.apply(loaded.model, found.policy) as handle:
        loaded.model.generate(torch.randint(3, 300, (1, 253)), max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert handle.stats()["sparse_calls"] > 2


def test_steps_are_timed(loaded):
    from dynaxx.integrations.transformers.apply_policy import model_facts
    from dynaxx.selection.pages import PageBudget

    found = decode_module.time_steps(
        loaded.model, model_facts(loaded.model), [PageBudget((0.1, 0.5))] * 2, 16, lengths=(64, 128)
    )
    assert [each.seqlen for each in found] == [64, 128]
    assert all(each.dense_seconds > 0 and each.sparse_seconds > 0 for each in found)


def test_captured_steps_decide_where_they_are_asked_to(loaded, monkeypatch):
    eager = [LengthTiming(n, 2.0, 2.0) for n in (128, 256, 512)]
    captured = [LengthTiming(n, 0.2, 0.1 if n > 128 else 0.2) for n in (128, 256, 512)]
    monkeypatch.setattr(decode_module, "time_steps", lambda *given: captured if given[4:] == (True,) else eager)
    monkeypatch.setattr(decode_module, "_timed_in_a_graph", lambda model: True)
    monkeypatch.setattr(decode_module, "_decoded", lambda *given: torch.zeros(8))
    ids = torch.randint(3, 300, (1, 128))
    tuned = partial(decode_module.tune_decode, loaded.model, [ids, ids], [ids], [0, 1], tolerance=0.1, page_size=16)
    found = tuned(cuda_graph=True)
    assert (found.dense_below, found.cuda_graph, found.captured) == (256, True, tuple(captured))
    assert found.said.splitlines()[0].endswith("launched one by one at no length")
    assert found.said.splitlines()[3].split() == ["256", "2000.00", "2000.00", "200.00", "100.00"]
    found = tuned()
    assert (found.dense_below, found.cuda_graph, found.timings) == (None, False, tuple(eager))
    assert found.said.splitlines()[0].endswith("in a CUDA graph from 256 tokens")


def test_captured_steps_that_cannot_be(loaded, tmp_path):
    with pytest.raises(ValueError, match="--decode"):
        tuned(*loaded, TEXT, out=tmp_path, cuda_graph=True)
    with pytest.raises(ValueError, match="on a GPU, got one on cpu"):
        tuned(*loaded, TEXT, out=tmp_path, decode=True, cuda_graph=True)


def test_texts_are_decoded_together_or_one_by_one(loaded):
    """A step of several texts equals one step of each text, in order."""
    texts = [torch.randint(3, 300, (1, 60)) for _ in range(2)]
    read = lambda ids: decode_module._read(loaded.model, ids[:, :40])
    each = [decode_module._decoded(loaded.model, read(ids), ids[:, 40:], None) for ids in texts]
    both = torch.cat(texts)
    torch.testing.assert_close(decode_module._decoded(loaded.model, read(both), both[:, 40:], None), torch.cat(each))


def test_a_model_writes_the_end_of_a_text(loaded):
    ids = torch.randint(3, 300, (1, 40))
    end = decode_module.written_end(loaded.model, ids, 10)
    assert end == decode_module.written_end(loaded.model, ids, 10)
    assert end != decode_module.written_end(loaded.model, ids, 10, seed=1)
    assert len(end) == 10
    changed = torch.cat([ids[:, :30], torch.zeros(1, 10, dtype=torch.long)], 1)
    assert end == decode_module.written_end(loaded.model, changed, 10), "the end of the text is not read"


def test_written_text_decides_too(loaded, monkeypatch):
    """A share that loses quality only on generated text is not accepted."""
    calls = []

    def decoded(model, cache, ids, policy):
        calls.append(policy)
        return torch.full((8,), 0.5 if policy is not None and len(calls) % 2 == 0 else 0.0)

    monkeypatch.setattr(decode_module, "_decoded", decoded)
    ids = torch.randint(3, 300, (1, 128))
    found = decode_module.tune_decode(loaded.model, [ids], [ids], [0, 1], tolerance=0.1, page_size=16)
    (trial,) = found.trials
    assert (trial.ratio, trial.passed) == (1.0, False)
    assert trial.written_ratio == pytest.approx(1.6487, abs=1e-4)
    assert found.share is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_are_timed_in_a_graph(loaded):
    from dynaxx.integrations.transformers.apply_policy import model_facts
    from dynaxx.selection.pages import PageBudget

    model = copy.deepcopy(loaded.model).to("cuda", torch.bfloat16)
    found = decode_module.time_steps(model, model_facts(model), [PageBudget((0.1, 0.5))] * 3, 16, True, (64, 256))
    assert [each.seqlen for each in found] == [64, 256]
    assert all(each.dense_seconds > 0 and each.sparse_seconds > 0 for each in found)


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_model_returns_from_the_device_of_the_search(loaded, device):
    model = copy.deepcopy(loaded.model)
    moved = []
    model.to = lambda device: moved.append(str(device))
    with pytest.raises(ValueError, match="stop"), search_module.on_device(model, device):
        raise ValueError("stop")
    assert moved == ([] if device is None else ["meta", "cpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_search_on_a_gpu_serves_a_model_on_a_cpu(loaded, tmp_path, monkeypatch):
    seen = []

    def timed(model, *_, **__):
        seen.append(model.device.type)
        return [LengthTiming(n, 2.0, 1.0) for n in (64, 256)]

    monkeypatch.setattr(search_module, "time_lengths", timed)
    options = dict(tokens=256, block_size=16, tolerance=0.5, reference=False)
    found = tuned(*loaded, TEXT, out=tmp_path / "gpu", search_on="cuda", **options)
    there = tuned(*loaded, TEXT, out=tmp_path / "cpu", **options)
    assert {*seen} == {"cpu"}
    assert found.budgets == there.budgets
    assert found.chosen.ratio == pytest.approx(there.chosen.ratio, abs=1e-3)
    assert loaded.model.device.type == "cpu"
