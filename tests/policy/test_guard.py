# SPDX-License-Identifier: Apache-2.0
"""The guard measures correctly and acts as the policy says, and its failures never reach a request."""

import errno
import gc
import logging
import os
import threading
import time
import weakref

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.measure import dense_rows, measure
from dynaxx.policy import Guard, load_profile, resolve
from dynaxx.policy.drift import Drift
from dynaxx.policy.guard import FAILURES_IN_A_ROW, REST_CALLS, Breaker, LayerGuard, Level, Monitor, failure_reason
from dynaxx.policy.plan import scaled, scaled_plan
from dynaxx.testing import make_qkv, oracle_attention
from tiny import llama, tokens

pytest.importorskip("transformers")

from dynaxx.integrations.transformers.apply_policy import attention_layers, model_facts

NARROW = dx.Rule.of(dx.SlidingWindow(16))
ALWAYS = {"sample": 1.0, "window": 2, "rows": 8}


@pytest.fixture(scope="module")
def model():
    return llama()


def policy_for(model, *rules, **guard):
    return dx.Policy(model=model_facts(model), rules=rules or (NARROW,), block_size=16, guard={**ALWAYS, **guard})


@torch.no_grad()
def logits(model, ids, **inputs):
    return model(ids, **inputs).logits


def serve(model, handle, times, seqlen=100):
    """Run requests one after the other, each measured before the next."""
    found = []
    for seed in range(times):
        found.append(logits(model, tokens(1, seqlen, seed=seed)))
        handle.wait()
    return found


# ---- measurements ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(100, 100), (33, 130), (16, 16)])
@pytest.mark.parametrize("given", [False, True])
def test_measurements_equal_those_of_the_oracle(lengths, given):
    q, k, v = make_qkv(1, *lengths, 6, 2, 16, seed=2)
    layout = dx.select_blocks(q, k, dx.SlidingWindow(9) | dx.TopK(0.3), block_size=16)
    at = [0, lengths[0] // 2, lengths[0] - 1]
    dense = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
    full = [oracle_attention(q, k, v, mask, None)[0] for mask in (dense[None, None], layout.to_dense())]
    found = measure(dense_rows(q, k, v, at, None), v, layout, full[1][0, at].float() if given else None)
    error = (full[1] - full[0])[0, at].norm(dim=-1).sum(0) / full[0][0, at].norm(dim=-1).sum(0)
    torch.testing.assert_close(found.error, error.float(), atol=1e-5, rtol=1e-4)
    scores = torch.einsum("qhd,khd->hqk", q[0].double(), k[0].double().repeat_interleave(3, 1)) / 4
    p = scores.masked_fill(~dense, -torch.inf).softmax(-1)[:, at].float()
    visible = layout.to_dense()[0][:, at]
    torch.testing.assert_close(found.recall, (p * visible).sum(-1).mean(-1), atol=1e-5, rtol=1e-4)
    even = dense[at].sum(-1).clamp(min=2).log()
    entropy = (-torch.special.xlogy(p, p).sum(-1) / even).mean(-1)
    torch.testing.assert_close(found.entropy, entropy, atol=1e-5, rtol=1e-4)
    rows = torch.tensor(at)[:, None] + lengths[1] - lengths[0]
    near = torch.arange(lengths[1]) > rows - 64
    torch.testing.assert_close(found.local, (p * near).sum(-1).mean(-1), atol=1e-5, rtol=1e-4)


def test_a_layout_of_everything_loses_nothing():
    q, k, v = make_qkv(1, 70, 70, 4, 2, 8)
    found = measure(dense_rows(q, k, v, range(70), None), v, dx.Causal().layout(70, block_size=16))
    assert float(found.recall.min()) > 1 - 1e-5
    assert float(found.error.max()) < 1e-5


def test_samples_reach_telemetry_and_statistics(model, telemetry, tmp_path):
    with dx.apply(model, policy_for(model), name="tiny") as handle:
        serve(model, handle, 6)
        found = handle.statistics("a test")
        handle.record(tmp_path / "statistics.json", interval=3600)
    assert telemetry.value("dynaxx_guard_checks_total", verdict="ok", model_name="tiny") == 12
    assert telemetry.value("dynaxx_recall_ratio") == 12
    assert 0.1 < telemetry.value("dynaxx_layer_recall_ratio", layer=1) < 0.9
    assert telemetry.value("dynaxx_layer_output_error_ratio", layer=1) > 0.05
    assert [each.calls for each in found.layers] == [6, 6]
    assert [each.ladder_calls for each in found.layers] == [2, 2]
    for row in found.layers[0].ladder:
        assert list(row) == sorted(row)  # more budget, more recall
    assert load_profile(tmp_path / "statistics.json").layers == found.layers


def test_padded_rows_and_packed_sequences_are_measured_alone(model):
    mask = torch.ones(2, 100, dtype=torch.int64)
    mask[0, :37] = 0
    with dx.apply(model, policy_for(model, dx.Rule.of(dx.TopK(1.0)), sample=1.0)) as handle:
        logits(model, tokens(2, 100), attention_mask=mask)
        handle.wait()
        for layer in handle.statistics().layers:
            assert layer.calls == 2
            assert all(histogram[-1] == 2 for histogram in layer.recall)  # all kept: each recall is 1


def test_nothing_is_measured_unless_the_policy_says_so(model, telemetry):
    with dx.apply(model, dx.Policy(model=model_facts(model), rules=(NARROW,), block_size=16)) as handle:
        logits(model, tokens(1, 100))
        handle.wait()
        assert handle.statistics() is None
        assert handle.drift() == []
    assert telemetry.value("dynaxx_guard_checks_total") == 0


def test_the_share_of_sampled_calls(model, telemetry):
    with dx.apply(model, policy_for(model, sample=0.2)) as handle:
        serve(model, handle, 100, seqlen=32)
    assert 20 <= telemetry.value("dynaxx_guard_checks_total", verdict="ok") <= 60


# ---- judgement ---------------------------------------------------------------------------------------------------


def test_a_monitor_has_hysteresis():
    monitor = Monitor(0.9, window=2, margin=0.5, least=True)
    said = [monitor.add(value) for value in (0.1, 0.95, 0.95, 0.95, 0.8, 0.94, 0.95, 0.96)]
    #       window not full, then means .525, .95, .95, .875, .87, .945, .955: again only from .95 on
    assert said == [False, True, False, False, True, True, True, False]
    at_most = Monitor(1.0, window=1, margin=0.2)
    assert [at_most.add(value) for value in (1.0, 1.1, 0.9, 0.81, 0.8, 0.95)] == [False, True, True, True, False, False]


def test_files_of_the_first_version_name_limits_in_another_way():
    former = {"least_recall": 0.9, "most_error": 0.2, "most_kl": 0.1}
    assert Guard.model_validate(former) == Guard(min_recall=0.9, max_error=0.2, max_kl=0.1)
    assert Drift.model_validate({"least_distance": 0.3}) == Drift(min_distance=0.3)


def test_widening_that_does_not_help_goes_dense_and_comes_back():
    guard = LayerGuard(Guard(min_recall=0.9, window=2, action="widen", margin=0.0))
    bad, good = {"recall": 0.5, "error": 9.0}, {"recall": 0.95}
    for measured, wider, level in (
        (bad, None, Level.OK), (bad, None, Level.WIDENED), (bad, good, Level.WIDENED), (bad, good, Level.WIDENED),
        (bad, bad, Level.DENSE), (bad, None, Level.DENSE), (good, None, Level.DENSE), (good, None, Level.OK),
    ):  # fmt: skip
        guard.add(measured, wider)
        assert guard.level == level
    assert guard.reasons() == []


def test_more_of_the_same_rule():
    assert scaled(dx.SlidingWindow(10), 2.5) == dx.SlidingWindow(25)
    assert scaled(dx.SlidingWindow((-1, 3)), 2) == dx.SlidingWindow((-1, 6))
    assert scaled(dx.Sink(4) | dx.Dilated(4, 2), 2) == dx.Sink(4) | dx.Dilated(8, 2)
    assert scaled(dx.Sink(4) | dx.TopK(0.3), 2) == dx.Sink(4) | dx.TopK(0.6)
    assert scaled(dx.TopK((0.0, 0.8, 0.1)), 2) == dx.TopK((0.0, 1.0, 0.2))
    assert scaled(dx.TopK(0.25), (1.0, 2.0)) == dx.TopK((0.25, 0.5))
    assert scaled(dx.TopK(3), 1.5) == dx.TopK(5)
    assert scaled(dx.TopP(0.75), 2) == dx.TopP(0.875)
    assert scaled(dx.TopP(0.75), 0.5) == dx.TopP(0.5)
    assert scaled(dx.Threshold(0.5), 2) == dx.Threshold(0.25)
    with pytest.raises(ValueError, match="no budget per head"):
        scaled(dx.Causal(), (1.0, 2.0))


@pytest.mark.parametrize("action", ["count", "warn", "widen", "dense"])
def test_beyond_a_limit_the_policys_action_is_taken(model, telemetry, action, caplog):
    """A window that is far too narrow misses the required recall."""
    dense = [logits(model, tokens(1, 100, seed=seed)) for seed in range(8)]
    policy = policy_for(model, min_recall=0.6 if action == "widen" else 0.95, widen=4.0, action=action)
    with caplog.at_level(logging.WARNING, "dynaxx"), dx.apply(model, policy) as handle:
        layouts = []
        with handle.watch(lambda layer, layout: layouts.append(layout.density())):
            found = serve(model, handle, 8)
        stats = handle.stats()
    assert telemetry.value("dynaxx_guard_checks_total", verdict="violated") == 14  # from the second of each layer on
    assert not torch.equal(found[0], dense[0])
    if action == "count":
        assert (stats["sparse_calls"], caplog.text) == (16, "")
        assert telemetry.value("dynaxx_guard_level") == 0
    if action == "warn":
        assert stats["sparse_calls"] == 16
        assert caplog.text.count("recall") == 2  # once per layer, and not per sample
        assert telemetry.value("dynaxx_events_total", event="guard_warned") == 2
    if action == "widen":
        assert stats["sparse_calls"] == 16
        assert layouts[-1] > 1.5 * layouts[0]
        assert telemetry.value("dynaxx_events_total", event="guard_widened") == 2
        assert telemetry.value("dynaxx_guard_level") == 2
    if action == "dense":
        assert stats == {"sparse_calls": 4, "own_pattern_calls": 0, "dense_calls": {"guard": 12}, "dense_sequences": {}}
        assert torch.equal(found[-1], dense[-1])
        assert telemetry.value("dynaxx_fallbacks_total", reason="guard") == 12
        assert telemetry.value("dynaxx_guard_level") == 3


def test_a_layer_that_recovers_is_sparse_again(model, telemetry):
    """A layer is dense while prompts are long. The rule is still measured, so short prompts make it sparse again."""
    policy = policy_for(model, dx.Rule.of(dx.SlidingWindow(64)), min_recall=0.8, action="dense")
    with dx.apply(model, policy) as handle:
        serve(model, handle, 4, seqlen=400)
        assert handle.stats()["dense_calls"]["guard"] > 0
        serve(model, handle, 4, seqlen=64)  # the window shows everything
        before = handle.stats()["sparse_calls"]
        serve(model, handle, 1, seqlen=64)
        assert handle.stats()["sparse_calls"] == before + 2
    assert telemetry.value("dynaxx_events_total", event="guard_recovered") == 2
    assert telemetry.value("dynaxx_guard_level") == 0


def test_next_tokens_are_compared_with_the_dense_models(model, telemetry):
    ids = tokens(1, 100)
    with dx.apply(model, policy_for(model, sample=0.0, kl_sample=1.0, max_kl=1e-6, window=1, action="dense")) as handle:
        sparse = logits(model, ids)
        handle.wait()
        assert telemetry.value("dynaxx_events_total", event="guard_dense") == 1
        with handle.request(sparse=False):
            dense = logits(model, ids)
        p, q = (x[0, -1].log_softmax(-1) for x in (dense, sparse))
        (series,) = (s for s in telemetry.snapshot() if s.metric.name == "dynaxx_next_token_kl_nats")
        assert series.sum == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
        assert handle.stats()["dense_calls"]["guard comparison"] == 2
        requests = telemetry.value("dynaxx_requests_total")
        assert requests == 2  # the comparison is none
        arguments = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, **arguments)
        handle.wait()
        assert handle.stats()["dense_calls"]["guard"] == 2  # both layers, whatever they are like alone


def test_a_base_model_has_no_next_token(model):
    with dx.apply(model.model, policy_for(model, kl_sample=1.0)) as handle:
        with torch.no_grad():
            model.model(tokens(1, 50))
        handle.wait()
        assert handle.stats()["sparse_calls"] == 2


# ---- failures ----------------------------------------------------------------------------------------------------


class CompilationError(Exception):
    """A stand-in for Triton's error of this name."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("misaligned address"), "kernel_failed"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (CompilationError("at 3:4"), "compile_failed"),
        (OSError("no such library"), "kernel_failed"),
    ],
)
def test_a_failing_call_runs_dense_and_is_counted_by_reason(model, telemetry, error, reason, caplog):
    ids, dense = tokens(1, 100), logits(model, tokens(1, 100))

    def fail(layer):
        if layer == 1:
            raise error

    assert failure_reason(error) == reason
    with dx.apply(model, policy_for(model, sample=0.0)) as handle:
        handle.faults.append(fail)
        for _ in range(2):
            assert not torch.equal(logits(model, ids), dense)  # layer 0 is sparse
        assert handle.stats()["sparse_calls"] == 2
        assert handle.stats()["dense_calls"] == {reason.replace("_", " "): 2}
        assert caplog.text.count("logged once") == 1
        assert telemetry.value("dynaxx_events_total", event=reason) == 2
        assert telemetry.value("dynaxx_fallbacks_total", reason=reason.replace("_", " ")) == 2
        handle.faults.clear()
        logits(model, ids)
        assert handle.stats()["sparse_calls"] == 4


def test_a_kernel_that_fails_for_real(model, monkeypatch):
    ids, dense = tokens(1, 100), logits(model, tokens(1, 100))
    monkeypatch.setattr("dynaxx.integrations.transformers.calls.sparse.sparse_attention", lambda *_, **__: 1 / 0)
    with dx.apply(model, policy_for(model)) as handle:
        assert torch.equal(logits(model, ids), dense)
        assert handle.stats()["dense_calls"] == {"kernel failed": 2}


def test_a_layer_that_keeps_failing_rests():
    breaker, tried = Breaker(), 0
    for _ in range(1000):
        if not breaker.resting():
            tried += 1
            breaker.failed()
    assert FAILURES_IN_A_ROW <= tried < 10
    breaker = Breaker()
    for _ in range(FAILURES_IN_A_ROW):
        assert not breaker.resting()
        breaker.failed()
    assert sum(breaker.resting() for _ in range(REST_CALLS + 5)) == REST_CALLS
    breaker.worked()
    breaker.failed()
    assert not breaker.resting()


def test_a_resting_layer_is_counted(model, telemetry):
    def fail(layer):
        raise RuntimeError

    with dx.apply(model, policy_for(model, sample=0.0)) as handle:
        handle.faults.append(fail)
        for seed in range(5):
            logits(model, tokens(1, 64, seed=seed))
        assert handle.stats()["dense_calls"] == {"kernel failed": 6, "resting after failures": 4}


def test_the_guards_own_failures_are_counted_and_nothing_else(model, telemetry, monkeypatch, caplog):
    monkeypatch.setattr("dynaxx.integrations.runtime.guarding.measure", lambda *_: 1 / 0)
    with dx.apply(model, policy_for(model, min_recall=1.0, action="dense")) as handle:
        serve(model, handle, 3)
        assert handle.stats()["sparse_calls"] == 6
    assert telemetry.value("dynaxx_telemetry_errors_total", what="guard") == 6
    assert caplog.text.count("division by zero") == 1


def test_a_full_queue_drops_samples(model, telemetry, monkeypatch):
    blocked = threading.Event()
    monkeypatch.setattr("dynaxx.integrations.runtime.guarding.dense_rows", lambda *_: blocked.wait(60) and 1 / 0)
    with dx.apply(model, policy_for(model)) as handle:
        for seed in range(10):
            logits(model, tokens(1, 64, seed=seed))
        assert telemetry.value("dynaxx_guard_checks_total", verdict="dropped") >= 14
        blocked.set()
        handle.wait()


def test_a_full_disk_for_the_statistics_file(model, telemetry, monkeypatch, tmp_path):
    file = tmp_path / "statistics.json"
    with dx.apply(model, policy_for(model)) as handle:
        handle.record(file, interval=0.02)
        serve(model, handle, 1)
        deadline = time.monotonic() + 20
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        before = load_profile(file)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        while not telemetry.value("dynaxx_telemetry_errors_total", what="statistics file"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        serve(model, handle, 1)
        assert telemetry.value("dynaxx_events_total", event="telemetry_failed") == 1
        assert load_profile(file) == before  # whole, if old
        assert [each.name for each in tmp_path.iterdir()] == ["statistics.json"]
        monkeypatch.undo()
    assert load_profile(file).layers[0].calls == 2


def test_statistics_files_that_are_none(tmp_path):
    file = tmp_path / "statistics.json"
    for text, message in (("", "not a file of statistics"), ('{"format": "dynaxx.profile", "ver', "is not JSON"),
                          ('{"format": "dynaxx.profile", "version": 9, "layers": []}', "`version`")):  # fmt: skip
        file.write_text(text)
        with pytest.raises(dx.PolicyError, match=message):
            load_profile(file)


# ---- lifetimes ---------------------------------------------------------------------------------------------------


def test_jobs_run_in_order_and_errors_do_not_stop_them():
    seen, failed = [], []
    background = Background(failed.append, depth=50)
    for number in range(20):
        assert background.submit(lambda number=number: seen.append(number) if number % 2 else 1 / 0)
    background.drain()
    assert seen == list(range(1, 20, 2))
    assert len(failed) == 10
    background.stop()
    assert not background.submit(lambda: None)
    background.drain()


def test_a_thread_ends_though_its_queue_is_full():
    background, blocked, ran = Background(lambda error: None, depth=1), threading.Event(), []
    background.submit(lambda: blocked.wait(60))
    while not background.submit(lambda: ran.append(1)):
        time.sleep(0.001)
    thread = background._thread
    threading.Timer(0.1, blocked.set).start()
    background.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_a_dropped_model_is_freed_with_its_guard():
    model = llama()
    module = weakref.ref(attention_layers(model)[0])
    handle = dx.apply(model, policy_for(model, kl_sample=1.0))
    serve(model, handle, 1)
    del model, handle
    gc.collect()
    assert module() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_thread_of_its_own():
    background = Background(lambda error: None)
    background.submit(lambda: None)
    background.drain()
    child = os.fork()
    if child == 0:
        done = threading.Event()
        background.submit(done.set)
        os._exit(0 if done.wait(20) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_plans_stay_plans_when_scaled(model):
    plan = resolve(policy_for(model, dx.Rule.of(dx.SlidingWindow(16) | dx.TopK(0.1))))[0]
    q, k, _ = make_qkv(1, 200, 200, 6, 2, 16)
    densities = [scaled_plan(plan, factor).layout(q, k).density() for factor in (0.5, 1, 2, 100)]
    assert densities == sorted(densities)
    assert densities[-1] == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_measurements_run_on_a_side_stream(telemetry):
    model = llama().to("cuda", torch.bfloat16)
    with dx.apply(model, policy_for(model, dx.Rule.of(dx.SlidingWindow(16) | dx.TopK(0.2)), kl_sample=1.0)) as handle:
        for seed in range(4):
            logits(model, tokens(1, 300, seed=seed).cuda())
        handle.wait()
        assert (
            handle.statistics().layers[0].calls + telemetry.value("dynaxx_guard_checks_total", verdict="dropped") >= 4
        )
    assert telemetry.value("dynaxx_telemetry_errors_total") == 0
    assert telemetry.value("dynaxx_next_token_kl_nats") >= 1


def test_a_reload_of_other_fields_keeps_what_the_guard_knows(model, telemetry):
    policy = policy_for(model, min_recall=0.95, action="dense")
    with dx.apply(model, policy) as handle:
        serve(model, handle, 3)
        handle.replace(policy.replace(rollout={"share": 0.9}))
        assert handle.statistics().layers[0].calls == 3
        assert telemetry.value("dynaxx_guard_level") == 3
        handle.replace(policy.replace(rules=(dx.Rule.of(dx.SlidingWindow(64)),)))
        assert handle.statistics() is None
        assert telemetry.value("dynaxx_guard_level") == 0
