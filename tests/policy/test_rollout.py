# SPDX-License-Identifier: Apache-2.0
"""Which requests run sparse, how everything is switched off, and how a policy is replaced while requests run."""

import contextvars
import os
import signal
import threading
import time

import pytest
import torch

import dynaxx as dx
from dynaxx.errors import PolicyError
from dynaxx.policy import KILL_SWITCH, KillSwitch, PolicyFollower, Rollout, policy_text, request, save_policy
from dynaxx.policy.rollout import ALL, choose, current_request
from tiny import llama, tokens

transformers = pytest.importorskip("transformers")

from dynaxx.integrations.transformers.apply_policy import model_facts  # noqa: E402

WINDOW = dx.Rule.of(dx.SlidingWindow(24))


@pytest.fixture(scope="module")
def model():
    return llama()


def policy_for(model, *rules, **fields):
    return dx.Policy(model=model_facts(model), rules=rules or (WINDOW,), **{"block_size": 16, **fields})


@torch.no_grad()
def logits(model, ids, **inputs):
    return model(ids, **inputs).logits


@pytest.fixture(autouse=True)
def released():
    yield
    KILL_SWITCH.release()


# ---- the share ---------------------------------------------------------------------------------------------------


def test_a_tenth_of_ten_thousand_ids_and_the_same_every_time():
    ids = [f"request-{i}" for i in range(10_000)]
    chosen = {each for each in ids if Rollout(share=0.1).admits(each)}
    assert abs(len(chosen) - 1000) <= 3 * (10_000 * 0.1 * 0.9) ** 0.5  # three standard errors
    assert chosen == {each for each in reversed(ids) if Rollout(share=0.1).admits(each)}
    assert [each for each in ids if each in chosen][:4] == ["request-17", "request-28", "request-38", "request-45"]
    larger = {each for each in ids if Rollout(share=0.3).admits(each)}
    assert chosen < larger  # a growing share keeps whom it had
    other = {each for each in ids if Rollout(share=0.1, seed=1).admits(each)}
    assert len(chosen & other) < 200
    assert not any(Rollout(share=0.0).admits(each) for each in ids)
    assert all(Rollout(share=1.0).admits(each) for each in ids)


def test_rows_share_the_requests_of_a_batch():
    rollout = Rollout(share=0.5)
    inside = next(f"{i}" for i in range(99) if rollout.admits(f"{i}"))
    outside = next(f"{i}" for i in range(99) if not rollout.admits(f"{i}"))
    with request(inside, outside):
        choice = choose(rollout, current_request(), lambda: 0)
    assert [choice.row(row, 4) for row in range(4)] == [True, True, False, False]  # two beams each
    assert [choice.row(row, 3) for row in range(3)] == [False] * 3  # fits nothing: dense
    assert choose(Rollout(), None, lambda: 0) is ALL
    assert current_request() is None
    with pytest.raises(TypeError, match="must be a string, got int 3"), request(3):
        pass


def test_a_declared_request_stays_in_its_thread_or_task():
    seen = []
    with request("a"):
        thread = threading.Thread(target=lambda: seen.append(current_request()))
        thread.start()
        thread.join()
        contextvars.copy_context().run(lambda: seen.append(current_request()))
    assert [None if each is None else each.ids for each in seen] == [None, ("a",)]


def test_dense_and_sparse_side_by_side(model, telemetry):
    ids = tokens(1, 100)
    dense = logits(model, ids)
    with dx.apply(model, policy_for(model, rollout={"share": 0.3})) as handle:
        names = [f"r{i}" for i in range(20)]
        found = {}
        for name in names:
            with handle.request(name):
                found[name] = torch.equal(logits(model, ids), dense)
        assert found == {name: not handle.policy.rollout.admits(name) for name in names}
        assert 0 < sum(found.values()) < 20
        with handle.request(sparse=True):
            sparse = logits(model, ids)
        with handle.request(names[0], sparse=False):
            assert torch.equal(logits(model, ids), dense)
        assert not torch.equal(sparse, dense)
        assert handle.stats()["dense_calls"]["request asked for dense"] == 2
    assert telemetry.value("dynaxx_requests_total", route="sparse") == 21 - sum(found.values())
    assert telemetry.value("dynaxx_requests_total", route="dense") == sum(found.values()) + 1


def test_rows_of_one_batch_go_their_own_ways(model):
    policy = policy_for(model, rollout={"share": 0.5})
    inside = next(f"{i}" for i in range(99) if policy.rollout.admits(f"{i}"))
    outside = next(f"{i}" for i in range(99) if not policy.rollout.admits(f"{i}"))
    ids = tokens(3, 100)
    dense = logits(model, ids)
    with dx.apply(model, policy) as handle:
        with request(inside):
            sparse = logits(model, ids)
        with request(outside, inside, outside):
            mixed = logits(model, ids)
    torch.testing.assert_close(mixed[[0, 2]], dense[[0, 2]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mixed[1], sparse[1], atol=1e-4, rtol=1e-4)
    assert handle.stats()["dense_sequences"] == {"request not in the rollout": 4}


def test_layers_and_lengths(model):
    with dx.apply(model, policy_for(model, rollout={"layers": [1], "min_tokens": 50, "max_tokens": 90})) as handle:
        for seqlen, sparse in ((49, 0), (50, 1), (90, 1), (91, 0)):
            handle.reset_stats()
            logits(model, tokens(1, seqlen))
            assert handle.stats()["sparse_calls"] == sparse, seqlen
        assert handle.stats()["dense_calls"] == {"layer not in the rollout": 1, "length not in the rollout": 1}
    with pytest.raises(PolicyError, match="`max_tokens` must be >= `min_tokens` = 9, got 8"):
        policy_for(model, rollout={"min_tokens": 9, "max_tokens": 8})


def test_a_request_keeps_its_route_over_chunks_and_unnamed_ones_are_numbered(model):
    """Requests without ids are numbered as they start; a chunk follows the decision of its cache."""
    policy = policy_for(model, rollout={"share": 0.5})
    with dx.apply(model, policy) as handle, torch.no_grad():
        for number in range(8):
            cache = transformers.DynamicCache(config=model.config)
            handle.reset_stats()
            for part in tokens(1, 96).split(32, dim=1):
                model(part, past_key_values=cache)
            assert handle.stats()["sparse_calls"] == (6 if policy.rollout.admits(f"#{number}") else 0)


def test_flags_of_open_feature_decide(model):
    api = pytest.importorskip("openfeature.api")
    from openfeature.flag_evaluation import FlagResolutionDetails
    from openfeature.provider import AbstractProvider, Metadata

    class Provider(AbstractProvider):
        broken = False

        def get_metadata(self):
            return Metadata("ours")

        def resolve_boolean_details(self, flag_key, default_value, evaluation_context=None):
            if self.broken:
                raise RuntimeError("the flag service is down")
            assert flag_key == "sparse-attention"
            return FlagResolutionDetails(evaluation_context.targeting_key == "chosen")

        resolve_string_details = resolve_integer_details = resolve_float_details = resolve_object_details = None

    provider = Provider()
    api.set_provider(provider)
    try:
        with dx.apply(model, policy_for(model, rollout={"flag": "sparse-attention", "share": 0.0})) as handle:
            for name, sparse in (("chosen", 2), ("other", 0)):
                handle.reset_stats()
                with handle.request(name):
                    logits(model, tokens(1, 64))
                assert handle.stats()["sparse_calls"] == sparse
            provider.broken = True
            with handle.request("chosen"):  # the share is the default, and nobody hears of it
                logits(model, tokens(1, 64))
            assert handle.stats()["sparse_calls"] == 0
    finally:
        api.clear_providers()


def test_a_flag_without_the_sdk_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openfeature", None)
    with pytest.raises(ImportError, match=r"dynaxx\[rollout\]"):
        dx.apply(model, policy_for(model, rollout={"flag": "x"}))
    assert model.config._attn_implementation == "sdpa"


# ---- the kill switch ---------------------------------------------------------------------------------------------


def test_every_source_of_the_kill_switch_works_within_one_request(model, telemetry, tmp_path, monkeypatch):
    ids = tokens(1, 100)
    dense = logits(model, ids)
    file = tmp_path / "kill"
    monkeypatch.setenv("DYNAXX_KILL_FILE", str(file))
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    KILL_SWITCH.on_signals()
    with dx.apply(model, policy_for(model)) as handle:
        switches = {
            "call": (handle.kill_switch.engage, handle.kill_switch.release),
            "process": (lambda: KILL_SWITCH.engage("process"), KILL_SWITCH.release),
            "signal": (
                lambda: os.kill(os.getpid(), signal.SIGUSR1),
                lambda: os.kill(os.getpid(), signal.SIGUSR2),
            ),
            "environment": (
                lambda: monkeypatch.setenv("DYNAXX_KILL", "1"),
                lambda: monkeypatch.setenv("DYNAXX_KILL", "0"),
            ),
            "file": (file.touch, file.unlink),
        }
        try:
            for source, (engage, release) in switches.items():
                assert not torch.equal(logits(model, ids), dense), source
                engage()
                assert torch.equal(logits(model, ids), dense), source
                assert handle.kill_switch.engaged() == source
                assert telemetry.value("dynaxx_kill_switch") == 1
                release()
                assert not torch.equal(logits(model, ids), dense), source
                assert telemetry.value("dynaxx_kill_switch") == 0
        finally:
            for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
                signal.signal(number, handler)
        assert handle.stats()["dense_calls"] == {"kill switch": 10}
    for event in ("kill_switch_on", "kill_switch_off"):
        assert telemetry.value("dynaxx_events_total", event=event) == 5


def test_a_request_under_way_stops_at_its_next_pass(model):
    cache = transformers.DynamicCache(config=model.config)
    with dx.apply(model, policy_for(model)) as handle, torch.no_grad():
        model(tokens(1, 64), past_key_values=cache)
        handle.kill_switch.engage()
        model(tokens(1, 32), past_key_values=cache)
        assert handle.stats() == {
            "sparse_calls": 2,
            "own_pattern_calls": 0,
            "dense_calls": {"kill switch": 2},
            "dense_sequences": {},
        }


def test_signals_need_the_main_thread():
    caught = []

    def other():
        try:
            KillSwitch().on_signals()
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


# ---- hot reload --------------------------------------------------------------------------------------------------


def test_a_changed_file_comes_into_force_and_a_bad_one_does_not(model, telemetry, tmp_path, caplog):
    file, first, second = tmp_path / "policy.json", policy_for(model), policy_for(model, dense_below=200)
    save_policy(first, file)
    with dx.apply(model, first) as handle:
        follower = handle.follow(file, interval=3600)
        assert not follower.check()
        save_policy(second, file)
        assert follower.check()
        assert handle.policy == second
        logits(model, tokens(1, 100))
        assert handle.stats()["dense_calls"] == {"below dense_below": 2}
        whole = policy_text(first)
        other = policy_for(model).model_dump(mode="json")
        other["model"]["layers"] = 3
        bad = {
            "cut short": (whole[: len(whole) // 2], "is not JSON"),
            "from the future": (whole.replace('"version": 1', '"version": 7', 1), "newer dynaxx wrote it"),
            "another model": (dx.Policy(**other).model_dump_json(), "policy is for another model"),
            "empty": ("", "is not JSON"),
        }
        for name, (text, message) in bad.items():
            caplog.clear()
            file.write_text(text)
            assert not follower.check(), name
            assert not follower.check(), name  # and it is said once
            assert caplog.text.count(message) == 1, name
            assert handle.policy == second
            assert telemetry.value("dynaxx_policy_stale") == 1
        file.unlink()
        assert not follower.check()
        assert "No such file" in caplog.text
        file.mkdir()  # what a reader cannot read, whoever runs this
        assert not follower.check()
        assert "cannot be read: Is a directory" in caplog.text
        file.rmdir()
        save_policy(first, file)
        assert follower.check()
        assert handle.policy == first
    assert telemetry.value("dynaxx_policy_reloads_total", result="ok") == 2
    assert telemetry.value("dynaxx_policy_reloads_total", result="failed") == 6
    assert telemetry.value("dynaxx_policy_stale") == 0
    assert telemetry.value("dynaxx_events_total", event="policy_refused") == 6


def test_a_daemon_thread_follows_and_a_clock_that_goes_back_does_not_matter(model, tmp_path, monkeypatch):
    file = tmp_path / "policy.json"
    save_policy(policy_for(model), file)
    with dx.apply(model, policy_for(model)) as handle:
        handle.follow(file, interval=0.01)
        monkeypatch.setattr(time, "time", lambda: -1e9)
        save_policy(policy_for(model, dense_below=7), file)
        os.utime(file, (0, 0))  # older than what it replaces
        deadline = time.monotonic() + 20
        while handle.policy.dense_below != 7 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert handle.policy.dense_below == 7
    with pytest.raises(ValueError, match="`interval` must be > 0"):
        PolicyFollower(file, lambda policy: True, interval=0)


def test_a_policy_replaced_in_the_middle_of_a_pass_changes_nothing_in_it(model):
    ids = tokens(1, 100)
    one, two = policy_for(model), policy_for(model, dx.Rule.of(dx.SlidingWindow(48)))
    with dx.apply(model, one) as handle:
        before = logits(model, ids)
        with handle.watch(lambda layer, layout: handle.replace(two) if layer == 0 else None):
            assert torch.equal(logits(model, ids), before)
        after = logits(model, ids)
        assert not torch.equal(after, before)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():  # nor does it change a request in its later chunks
            first = model(ids[:, :50], past_key_values=cache).logits
            handle.replace(one)
            rest = model(ids[:, 50:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), after, atol=2e-4, rtol=2e-4)


def test_requests_in_threads_while_the_policy_is_replaced(model):
    ids = tokens(1, 80)
    policies = [policy_for(model), policy_for(model, dx.Rule.of(dx.SlidingWindow(40)))]
    wanted = []
    for policy in policies:
        with dx.apply(model, policy):
            wanted.append(logits(model, ids))
    wrong = []
    with dx.apply(model, policies[0]) as handle:

        def serve():
            for _ in range(20):
                found = logits(model, ids)
                if not any(torch.allclose(found, each, atol=1e-4) for each in wanted):
                    wrong.append(found)

        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(50):
            handle.replace(policies[turn % 2])
            time.sleep(0.002)
        for thread in threads:
            thread.join()
        assert not wrong
        stats = handle.stats()
        assert stats["sparse_calls"] == 3 * 20 * 2
