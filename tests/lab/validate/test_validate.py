# SPDX-License-Identifier: Apache-2.0
"""`validate` measures correctly on a tiny model, and fails a bad policy."""

import copy
import json
import math
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import dynaxx as dx
from dynaxx.lab import prefill_speed
from dynaxx.lab.about import policy_digest
from dynaxx.lab.kinds import digest_of, text_of
from dynaxx.lab.progress import SilentProgress
from dynaxx.lab.tasks import run as tasks
from dynaxx.lab.tasks.run import SuitePlan
from dynaxx.lab.tasks.score import answer_task
from dynaxx.lab.texts import pydoc_text, split_text
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.tune.crossover import LengthTiming
from dynaxx.lab.tune.pipeline.raise_border import validate_tuned
from dynaxx.lab.tune.result import TuneResult
from dynaxx.lab.validate import comparison
from dynaxx.lab.validate import run as module
from dynaxx.lab.validate.check import Check
from dynaxx.lab.validate.comparison import repeated
from dynaxx.lab.validate.result import KindRow, SpeedRow, ValidationResult, slowdown_check
from dynaxx.lab.validate.run import validate
from dynaxx.lab.validate.tasks import TASKS, make_samples
from dynaxx.policy import Tolerances
from slow_clock import SlowClock

transformers = pytest.importorskip("transformers")
from dynaxx.integrations.transformers.apply_policy import model_facts  # noqa: E402


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text, **_):
        return {"input_ids": [1 + ord(letter) % 96 for letter in text]}

    def decode(self, ids):
        return "".join(chr(32 + int(i)) for i in ids)


def words(count, seed=0):
    rng = random.Random(seed)
    return "".join(rng.choice(("sparse ", "block ", "query ", "attends ", "to.\n\n")) for _ in range(count))


TEXT = words(2000)


def timed(seqlen, speedup, low=None, high=None, pairs=5):
    return SpeedRow(seqlen, 1.0, 1 / speedup, speedup, pairs, None, None, low or speedup, high or speedup)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def check(model, rule, *, tokens=800, lengths=(300,), **fields):
    policy = dx.Policy(model=model_facts(model), block_size=16, rules=(dx.Rule.of(rule),), **fields)
    return validate(model, Letters(), policy, TEXT, lengths=lengths, tokens=tokens)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(comparison, "NEW_TOKENS", 8)
    monkeypatch.setattr(module, "TASK_SAMPLES", 2)
    monkeypatch.setattr(prefill_speed, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(prefill_speed, "MAX_SECONDS", 0.0)


def test_a_policy_that_keeps_everything_passes(model):
    found = check(model, dx.SlidingWindow(16) | dx.TopK(1.0), tolerances=Tolerances(slowdown=None, kl=1e-6))
    assert found.passed, found.summary()
    assert found.density == 1
    assert found.layer_calls["sparse_calls"] == 6
    assert found.perplexity.ratio == pytest.approx(1, abs=1e-5)
    assert found.logits.top1_agreement > 0.99
    assert found.logits.max_error < 1e-3
    assert [task.task for task in found.tasks] == list(TASKS)
    assert {row.seqlen for row in found.speed} == {300}
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["passed"] is True
    assert set(document["checks"][0]) == {
        "name", "value", "limit", "passed", "unit", "where", "low", "high", "unclear", "said",
    }  # fmt: skip
    assert document["speed"][0]["dense_peak_mb"] > 0
    assert "pass  perplexity +0.00 % (limit +1.00 %) on held-out text of the sample" in found.summary()


@pytest.mark.parametrize("suite", [None, SuitePlan(("niah_single_1",), (900,), 2)])
def test_a_stopped_validation_goes_on(model, monkeypatch, tmp_path, suite):
    policy = dx.Policy(model=model_facts(model), block_size=16, rules=(dx.Rule.of(dx.SlidingWindow(64)),))
    text = pydoc_text() if suite else TEXT
    run = partial(validate, model, Letters(), policy, text, lengths=(300,), tokens=800, suite=suite)
    expected, state, measured = run(), tmp_path / "validation_state.jsonl", []

    def stop(*args):
        raise KeyboardInterrupt

    def noted(name):
        real = getattr(comparison.Comparison, name)
        monkeypatch.setattr(comparison.Comparison, name, lambda *args: measured.append(name) or real(*args))

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "time_prefill", stop)
        with pytest.raises(KeyboardInterrupt):
            run(state=state)
    for name in ("_stretch", "_retrieval", "_repetition"):
        noted(name)
    monkeypatch.setattr(tasks, "_answers", stop)
    found = run(state=state)
    assert measured == []
    for name in ("logits", "perplexity", "noise", "tasks", "repetition", "suite", "density", "layer_calls"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.to_dict()["ended"] == "done"


def test_a_policy_that_sees_little_fails(model):
    limits = Tolerances(perplexity_ratio=1.0001, kl=1e-4, top1_agreement=0.999, logits_mean_error=1e-3)
    found = check(model, dx.SlidingWindow(2), tolerances=limits)
    assert not found.passed
    failed = {each.name for each in found.checks if not each.passed}
    assert failed >= {"kl", "top1_agreement", "logits_mean_error"}
    assert "FAIL  kl" in found.summary()
    assert found.density < 0.2


def test_density_is_that_of_the_length_it_is_said_of(model):
    rule = dx.Sink(16) | dx.LastQueries(64)  # of one token less, the last 64 queries lie in five blocks instead of four
    found = check(model, rule, tokens=512, lengths=())
    assert found.window_tokens == 512
    assert found.density == pytest.approx(rule.layout(512, causal=True, block_size=16).density())


def test_advice_knows_what_a_policy_was_tuned_on():
    values = {"perplexity_ratio on code": 1.0, "perplexity_ratio on legal, tuned without it": 1.0, "tokens": 1}
    policy = SimpleNamespace(evidence=[SimpleNamespace(values=values)])
    assert module._tuned_kinds(policy) == ("code",)
    rows = tuple(
        KindRow(kind, label, 512, "", 10.0, 1.03, 0.001) for kind, label in (("code", "source code"), ("legal", "law"))
    )
    checks = (Check("perplexity_ratio", 1.03, 1.01, False),)
    found = ValidationResult(
        False, checks, None, None, (), None, (), 0.3, {}, 1, 512, 0, kinds=rows, tuned_kinds=("code",)
    )
    new, known, lower = found.advice()
    assert new == "The policy was not tuned for law; tune again with `--kinds legal` in addition to your text."
    assert known.startswith("The policy was tuned for source code, on other text")
    assert "lower --tolerance" in lower


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (timed(640, 0.8), "slow"),
        (timed(640, 0.8, low=0.7, high=1.1), "unclear"),
        (timed(640, 0.92, pairs=3), "unclear"),  # chance alone does that once in eight times
        (timed(640, 0.5, pairs=3), "slow"),
        (timed(640, 1.0, low=0.9, high=1.2), "unclear"),
        (timed(640, 1.5, low=1.2, high=1.9), "fast"),
    ],
)
def test_only_a_difference_beyond_the_noise_fails_speed(row, said):
    assert row.against(1.03) == said
    for rows in ((row,), (timed(64, 2.0), row)):
        found = slowdown_check(rows, 1.03)
        assert (found.passed, found.unclear) == (said != "slow", said == "unclear")
    assert (f"{1 / row.high:.2f} to {1 / row.low:.2f} measured" in found.said) == (row.low < row.high)


def test_speed_decides_only_where_the_policy_runs_sparse(model):
    """A policy that is dense at every timed length has no check of speed, so noise cannot fail it."""
    found = check(model, dx.SlidingWindow(16), dense_below=700, lengths=(300, 500))
    assert [row.seqlen for row in found.speed] == [700]
    assert "prompts of fewer than 700 tokens run dense and were not timed" in found.summary()
    decode = dx.Rule.of(dx.Sink(4) | dx.TopK(0.5), phase="decode")
    policy = dx.Policy(model=model_facts(model), block_size=16, rules=(decode,))
    found = validate(model, Letters(), policy, TEXT, lengths=(300,), tokens=800)
    assert found.speed == ()
    assert "slowdown" not in {each.name for each in found.checks}


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (3, 0), (5, 0), (6, 0), (9, 1), (12, 2), (20, 5)])
def test_the_interval_of_pairs_holds_the_median(count, rank):
    ratios = [float(i) for i in range(count)]
    random.Random(0).shuffle(ratios)
    assert prefill_speed.interval(ratios) == (rank, count - 1 - rank)


def test_a_busy_machine_decides_nothing_about_speed(model, monkeypatch):
    """Passes whose wall times are noise alone never fail a policy, however the noise falls."""
    monkeypatch.setattr(prefill_speed, "watch_others", lambda: lambda: True)
    for seed in range(40):
        rng = random.Random(seed)
        noise = lambda rng=rng: 1.0 * (1 + 2 * rng.random() * (rng.random() < 0.5))
        run = lambda *_, noise=noise: prefill_speed._Pass(noise(), 1.0, None)
        monkeypatch.setattr(prefill_speed, "_prefill", run)
        row = prefill_speed.time_prefill(model, torch.zeros(1, 8, dtype=torch.int64), lambda: None, 1.03)
        assert row.against(1.03) != "slow", row
        assert row.low <= row.speedup <= row.high


@pytest.mark.parametrize(("seconds", "lengths"), [(40.0, [150, 300]), (10.0, [150]), (None, [150, 300, 1200])])
def test_the_longest_prompts_that_fit_are_timed_and_the_border(model, monkeypatch, seconds, lengths):
    """Under a time budget; one at the border alone says little of the speed."""
    time = TimeBudget(seconds, clock := SlowClock())
    time.learn(PASS, 300, 4.0)

    def time_prefill(model, ids, *given):
        clock.spend(8 * ids.shape[1] / 300)
        return timed(ids.shape[1], 1.5)

    monkeypatch.setattr(comparison, "time_prefill", time_prefill)
    policy = dx.Policy(model=model_facts(model), rules=(dx.Rule.of(dx.SlidingWindow(40)),))
    run = comparison.Comparison(model, policy, SilentProgress(), time=time)
    assert [row.seqlen for row in run.speed([1] * 1200, (150, 300, 1200), 30)] == lengths
    assert len(run.skipped) == 3 - len(lengths)


def test_failed_checks_come_with_advice():
    rows = [timed(n, speed) for n, speed in ((512, 1.0), (640, 0.8), (2048, 1.5))]
    slow, worse = Check("slowdown", 1.25, 1.03, False), Check("kl", 0.2, 0.1, False, "nats")

    def result(checks, speed=rows, border=0):
        return ValidationResult(False, checks, None, None, (), None, tuple(speed), 0.3, {}, 1, 512, 0, border)

    def advice(*args):
        return result(*args).advice()

    assert advice((Check("kl", 0.0, 0.1, True),)) == []
    assert "lower --tolerance" in " ".join(advice((worse,)))
    none = Check("perplexity_ratio", 1.01, 1.0, False)
    assert advice((none,)) == ["Tune again on more text of the kind that failed."], "no tolerance is below 0"
    assert "`dense_below` and `sparse_from` in the policy to 2,048 tokens" in " ".join(advice((slow,)))
    assert "to more than 640 tokens" in " ".join(advice((slow,), rows[:2]))
    assert len(advice((slow, worse))) == 2
    busy = [replace(row, busy=True) for row in rows]
    assert "Measure speed again on a quiet machine." in advice((slow,), busy)
    assert (
        "The machine was busy while prompts of 512 and 640 and 2,048 tokens were timed." in result((slow,), busy).busy
    )
    assert result((slow,)).later_border() == 2048
    assert result((slow,)).later_border([512, 1024, 8192]) == 1024
    assert result((slow,), rows[:2]).later_border() is None, "no longer length is known"
    unclear = [rows[0], replace(rows[1], high=1.1), rows[2]]
    assert result((slow,), unclear).later_border() is None, "a difference within the noise raises nothing"
    assert result((slow, worse)).later_border() is None, "not only speed"
    assert result((Check("slowdown", 1.0, 1.03, True),), rows[:1]).later_border() is None


def test_a_tuned_policy_runs_from_a_later_length_where_only_speed_fails(model, monkeypatch, tmp_path):
    policy = dx.Policy(
        model=model_facts(model), block_size=16, dense_below=200, sparse_from=250, rules=(dx.Rule.of(dx.Sink(16)),)
    )
    timings = tuple(LengthTiming(n, 1.0, 0.5) for n in (128, 256, 512))
    tuned = TuneResult("m", 5000, 0.01, "", 1.0, (), (), None, None, timings, (), (), 1.0, "dynaxx tune", policy)
    slow_until, seen = 300, []

    def validate(model, tokenizer, policy, text, *, lengths, tokens, time=None):
        assert tokens == 5000, "texts are as long as those that were tuned on"
        if policy.sparse_from > 600:
            raise ValueError("give more text")
        seen.append(policy.sparse_from)
        rows = [timed(n, 1 / 1.2) for n in (policy.sparse_from,) if n <= slow_until]
        rows.append(timed(100, 1.0))
        check = Check("slowdown", 1.2 if len(rows) > 1 else 1.0, 1.03, len(rows) == 1)
        return ValidationResult(
            check.passed, (check,), None, None, (), None, tuple(rows), 0.3, {}, 1, 512, 0, policy.sparse_from
        )

    monkeypatch.setattr(module, "validate", validate)
    said = []
    later, found = validate_tuned(model, None, tuned, TEXT, out=tmp_path, say=said.append, lengths=(100,))
    assert found.passed
    assert seen == [250, 256, 512]
    assert (later.policy.dense_below, later.policy.sparse_from, later.sparse_from) == (409, 512, 512)
    assert dx.load_policy(tmp_path / "policy.json") == later.policy
    document = json.loads((tmp_path / "tuning.json").read_text())
    assert document["about"]["policy"] == policy_digest(later.policy), "results follow a border that was raised"
    assert (document["sparse_from"], len(document["raised"])) == (512, 2)
    assert [each.values["tokens"] for each in later.policy.evidence] == [250, 256]
    assert [(each.before, each.after, each.seqlen) for each in later.raised] == [(250, 256, 250), (256, 512, 256)]
    assert [line.split(": ")[1] for line in said] == [
        "slower than dense at 250 tokens, so sparse from 256", "slower than dense at 256 tokens, so sparse from 512",
    ]  # fmt: skip
    slow_until, timings = 900, (*timings, LengthTiming(1000, 1.0, 0.5))
    same, found = validate_tuned(model, None, replace(tuned, crossover=timings), TEXT, out=tmp_path, lengths=(100,))
    assert not found.passed, "there is no text for 1,000 tokens: what was validated last stays"
    assert same.policy.sparse_from == found.sparse_from == 512


def test_figures_are_those_of_a_plain_computation(model):
    rule = dx.SlidingWindow(40)
    found = check(model, rule, tolerances=Tolerances(slowdown=None))
    ids = Letters()(module.split_text(TEXT).held_out)["input_ids"]
    starts = [0, (len(ids) - 800) // 2, 2 * ((len(ids) - 800) // 2)]
    assert found.windows == 3
    windows = torch.tensor([ids[start : start + 800] for start in starts])
    policy = dx.Policy(model=model_facts(model), block_size=16, rules=(dx.Rule.of(rule),))
    with torch.no_grad():
        dense = model(windows[:, :-1]).logits.double()
        with dx.apply(model, policy):
            sparse = model(windows[:, :-1]).logits.double()
    loss = [torch.nn.functional.cross_entropy(x.flatten(0, 1), windows[:, 1:].flatten()) for x in (dense, sparse)]
    assert found.perplexity.dense == pytest.approx(float(loss[0].exp()), rel=1e-4)
    assert found.perplexity.ratio == pytest.approx(float((loss[1] - loss[0]).exp()), rel=1e-4)
    assert found.logits.max_error == pytest.approx(float((dense - sparse).abs().max()), rel=1e-3)
    assert found.logits.mean_error == pytest.approx(float((dense - sparse).abs().mean()), rel=1e-3)
    assert found.logits.top1_agreement == pytest.approx(float((dense.argmax(-1) == sparse.argmax(-1)).double().mean()))
    p, q = dense.log_softmax(-1), sparse.log_softmax(-1)
    assert found.logits.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def test_a_policy_of_another_model_is_refused_before_anything_is_computed(model, monkeypatch):
    facts = model_facts(model)
    policy = dx.Policy(model=type(facts)(**{**dict(facts), "layers": 12}), rules=(dx.Rule.of(dx.SlidingWindow(16)),))
    monkeypatch.setattr(comparison.Comparison, "hidden", lambda run, ids: pytest.fail("computed first"))
    with pytest.raises(dx.PolicyError, match=r"`model.layers` is 12 in the policy and 2 in the model"):
        validate(model, Letters(), policy, TEXT, lengths=(300,), tokens=800)


def test_policies_that_would_not_run_sparse_are_not_validated(model):
    with pytest.raises(ValueError, match=r"dense below 900 tokens, .* measured at 800; `tokens` must be at least 901"):
        check(model, dx.SlidingWindow(16), dense_below=300, sparse_from=900)
    policy = dx.Policy(model=model_facts(model), dense_below=900, rules=(dx.Rule.of(dx.SlidingWindow(16)),))
    with pytest.raises(ValueError, match=r"half of the text has \d+; give a text of about 1,802 tokens"):
        validate(model, Letters(), policy, TEXT[:1500])
    with pytest.raises(
        ValueError, match=r"dense below 5,000 tokens and the model's limit is 1,024, so it never runs sparse"
    ):
        check(model, dx.SlidingWindow(16), dense_below=5000)
    with pytest.raises(ValueError, match=r"`lengths` must be from 2 to 1,024"):
        check(model, dx.SlidingWindow(16), lengths=(2000,))
    for rules in ((), (dx.Rule.of(None),)):
        policy = dx.Policy(model=model_facts(model), rules=rules)
        with pytest.raises(ValueError, match="the policy has no sparse rule, so it runs everything dense"):
            validate(model, Letters(), policy, TEXT, lengths=(300,), tokens=800)


def test_quality_and_time_are_measured_where_the_policy_runs(model, monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 400)
    found = check(model, dx.SlidingWindow(16), tokens=None, dense_below=600, tolerances=Tolerances(slowdown=None))
    assert found.window_tokens == 601
    assert found.layer_calls["sparse_calls"] == 6
    assert [row.seqlen for row in found.speed] == [600], "300 tokens run dense"


def test_another_border_keeps_what_ran_the_same_blocks(model, monkeypatch, tmp_path):
    limits = Tolerances(slowdown=None)
    policy = dx.Policy(
        model=model_facts(model), block_size=16, dense_below=100, rules=(dx.Rule.of(dx.SlidingWindow(40)),),
        tolerances=limits,
    )  # fmt: skip
    options = dict(lengths=(300,), tokens=700)
    later = policy.replace(dense_below=400, sparse_from=400)
    whole, state = validate(model, Letters(), later, TEXT, **options), tmp_path / "validation_state.jsonl"
    first = validate(model, Letters(), policy, TEXT, **options, state=state)
    monkeypatch.setattr(comparison.Comparison, "_stretch", lambda *_, **__: pytest.fail("compared"))
    monkeypatch.setattr(comparison.Comparison, "_retrieval", lambda *_, **__: pytest.fail("asked twice"))
    kept = validate(model, Letters(), later, TEXT, **options, state=state)
    assert (kept.logits, kept.perplexity, kept.tasks) == (whole.logits, whole.perplexity, whole.tasks)
    assert (kept.density, kept.layer_calls["sparse_calls"]) == (whole.density, whole.layer_calls["sparse_calls"])
    assert kept.repetition == whole.repetition
    rows = lambda found: {row.seqlen: row for row in found.speed}
    assert set(rows(kept)) == {400}
    longer = policy.replace(dense_below=200, sparse_from=200)
    kept = validate(model, Letters(), longer, TEXT, **options, state=state)
    assert rows(kept)[300] == rows(first)[300], "it ran sparse already"
    assert set(rows(kept)) == {200, 300}
    latest = later.replace(dense_below=750, sparse_from=750)
    with pytest.raises(pytest.fail.Exception, match="compared"):
        validate(model, Letters(), latest, TEXT, lengths=(300,), state=state)  # longer stretches than before


def test_other_kinds_of_text_are_held_to_the_same_limit(model):
    policy = dx.Policy(
        model=model_facts(model), block_size=16, rules=(dx.Rule.of(dx.SlidingWindow(4)),),
        tolerances=Tolerances(perplexity_ratio=1.0001, slowdown=None, task_logprob_drop=None),
    )  # fmt: skip
    found = validate(model, Letters(), policy, TEXT, lengths=(300,), tokens=600, kinds=("code", "tables"))
    assert [row.kind for row in found.kinds] == ["code", "tables"]
    checks = {check.where: check for check in found.checks if check.name == "perplexity_ratio"}
    assert list(checks) == ["held-out text of the sample", "Python source code", "tables"]
    ids = torch.tensor([Letters()(split_text(text_of("code")).held_out)["input_ids"][:600]])
    with torch.no_grad():
        dense = model(ids[:, :-1]).logits
        with dx.apply(model, policy):
            sparse = model(ids[:, :-1]).logits
    entropy = lambda logits: torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none").double()
    losses = [entropy(dense), entropy(sparse)]
    change = losses[1] - losses[0]
    row = found.kinds[0]
    assert row.ratio == pytest.approx(float(change.mean().exp()), rel=1e-5)
    assert row.error == pytest.approx(float(change.std() / 599**0.5), rel=1e-4)
    assert row.dense == pytest.approx(float(losses[0].mean().exp()), rel=1e-4)
    assert (row.tokens, row.digest) == (599, digest_of(text_of("code")))
    failing = [check for check in checks.values() if not check.passed]
    assert failing
    for check in failing:
        assert f"FAIL  perplexity +{100 * (check.value - 1):.2f} % (limit +0.01 %) on {check.where}" in found.summary()
    worse = [each.kind for each in found.kinds if each.ratio > 1.0001]
    assert not worse or f"`--kinds {','.join(worse)}`" in found.summary()
    with pytest.raises(ValueError, match="no kind of text 'poems'"):
        validate(model, Letters(), policy, TEXT, lengths=(300,), tokens=600, kinds=("poems",))


def test_the_noise_of_the_dense_model_is_its_own(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = check(model, dx.SlidingWindow(16), tolerances=Tolerances(slowdown=None))
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "the weights are put back, bit by bit"
    ids = torch.tensor([Letters()(split_text(TEXT).held_out)["input_ids"][:800]])
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
        loss = [
            float(torch.nn.functional.cross_entropy(each(ids[:, :-1]).logits[0], ids[0, 1:]))
            for each in (model, rounded)
        ]
    assert found.noise.rounding == pytest.approx(math.exp(loss[1] - loss[0]) - 1, abs=1e-5)
    assert found.noise.stretches > 0
    assert "with weights rounded to bfloat16, and differs by" in found.summary()


def test_a_suite_takes_the_place_of_the_three_tasks(model):
    policy = dx.Policy(model=model_facts(model), block_size=16, rules=(dx.Rule.of(dx.SlidingWindow(16)),))
    plan = SuitePlan(("niah_single_1",), (700,), samples=2)
    found = validate(model, Letters(), policy, pydoc_text(), lengths=(300,), tokens=600, suite=plan)
    assert found.tasks == ()
    assert [row.verdict for row in found.suite.rows] == ["not informative"]
    (held,) = [each for each in found.checks if each.name == "suite"]
    assert held.passed
    assert "pass  0 informative long-context tasks fail (limit 0)" in found.summary()
    assert "niah_single_1" in found.summary()
    json.dumps(found.to_dict(), allow_nan=False)
    later = policy.replace(dense_below=701)
    found = validate(model, Letters(), later, pydoc_text(), lengths=(300,), tokens=800, suite=plan)
    assert [row.verdict for row in found.suite.rows] == ["dense by policy"]
    with pytest.raises(ValueError, match="at most the model's limit 1,024"):
        validate(model, Letters(), policy, pydoc_text(), lengths=(300,), suite=SuitePlan(lengths=(2000,)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("perplexity_ratio", 1.0138, 1.01, "", "Python source code"),
            "perplexity +1.38 % (limit +1.00 %) on Python",
        ),
        (("perplexity_ratio", 1.01001, 1.01, "", ""), "perplexity +1.001 % (limit +1.000 %) on held-out text"),
        (("perplexity_ratio", 0.99999999, 1.01, "", ""), "perplexity +0.00 % (limit"),
        (("top1_agreement", 0.971, 0.99, "", ""), "the same for 97.1 % of the tokens (at least 99.0 %)"),
        (
            ("slowdown", 1.2, 1.03, "", "64 tokens"),
            "prefill of 64 tokens takes 1.20 times as long as dense",
        ),
        (("repetition_increase", 0.2, 0.1, "", ""), "repeated 4-grams in generated text +20.0 points (limit +10.0)"),
        (
            ("task_logprob_drop", 0.2, 0.1, "nats", "the task 'needle'"),
            "0.200 nats lost per answer token (limit 0.100)",
        ),
        (("kl", 0.2, 0.1, "nats", ""), "kl: 0.2000 nats (limit 0.1000)"),
    ],
)
def test_checks_are_said_in_words(given, said):
    name, value, limit, unit, where = given
    assert said in Check(name, value, limit, False, unit, where).said


def test_a_policy_without_any_limit_is_refused(model):
    with pytest.raises(ValueError, match="tolerances are all null, so nothing could fail"):
        check(model, dx.SlidingWindow(16), tolerances=Tolerances(**dict.fromkeys(Tolerances.model_fields)))


def test_the_model_is_left_as_it_was(model):
    ids = torch.tensor([Letters()(TEXT[:100])["input_ids"]])
    before = model(ids).logits
    model.train()
    check(model, dx.SlidingWindow(16))
    assert model.training
    model.eval()
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "sdpa"


def test_tasks_hold_their_facts():
    haystack = Letters()(words(900, seed=3))["input_ids"]
    said = lambda ids: "".join(chr((i - 1) if i > 32 else i + 95) for i in ids.flatten().tolist())
    samples = make_samples(Letters(), haystack, 900, 3, seed=1)
    assert [sample.task for sample in samples] == list(TASKS) * 3
    depths = []
    for sample in samples:
        assert sample.prompt.shape == (1, 900)
        prompt, answer = said(sample.prompt), said(sample.answer).strip()
        if sample.task == "variable tracing":
            first, second, third = answer.split(", ")
            assert f"VAR {second} = VAR {first}" in prompt
            assert f"VAR {third} = VAR {second}" in prompt
            assert prompt.endswith("are:")
        else:
            assert prompt.count(f"is {answer}.") == 1
            assert prompt.count("The secret number of") == (2 if sample.task == "needle" else 7)
        if sample.task == "needle":
            depths.append(prompt.index(answer))
    assert depths == sorted(depths)
    again = make_samples(Letters(), haystack, 900, 3, seed=1)
    assert all(torch.equal(a.prompt, b.prompt) for a, b in zip(samples, again, strict=True))
    with pytest.raises(ValueError, match="retrieval tasks need prompts of some hundred tokens"):
        make_samples(Letters(), haystack, 200, 1)


def test_scores_are_teacher_forced(model):
    for sample in make_samples(Letters(), Letters()(TEXT)["input_ids"], 700, 1):
        scored = answer_task(model, None, sample, generate=False)
        with torch.no_grad():
            ids = torch.cat([sample.prompt, sample.answer[None]], dim=1)
            found = model(ids).logits.log_softmax(-1)[0, sample.prompt.shape[1] - 1 : -1]
        assert scored.logprob == pytest.approx(float(found[range(len(sample.answer)), sample.answer].mean()), rel=1e-4)
        assert scored.match == pytest.approx(float((found.argmax(-1) == sample.answer).float().mean()))


def test_repetition_counts_what_came_before():
    assert repeated([1, 2, 3]) == 0
    assert repeated([1, 2, 3, 4, 5, 6]) == 0
    assert repeated([7] * 10) == pytest.approx(6 / 7)
    assert math.isclose(repeated([1, 2, 3, 4] * 3), 5 / 9)
