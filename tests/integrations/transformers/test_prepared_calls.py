# SPDX-License-Identifier: Apache-2.0
"""Layers repeat the prepared call of an equal layer, here on a CPU. `ops/test_prepared.py` records calls on a GPU."""

import pytest
import torch
from small_models import SPARSE, llama, logits, policy_for, tokens

import dynaxx as dx
from dynaxx.integrations.transformers import repeats
from dynaxx.integrations.transformers.calls import layer as layers
from dynaxx.integrations.transformers.calls import sparse
from dynaxx.ops.prepared import layer as prepared
from dynaxx.policy import Guard
from dynaxx.telemetry import Recorder, use

RULES = {"rule": SPARSE, "pattern": dx.SlidingWindow(24) | dx.Sink(4)}


@pytest.fixture
def repeated(monkeypatch):
    """Prepare calls on a CPU, and list the layers that repeat one."""

    def prepare_rule(rule, layout, q, k, v, *, scale=None, softcap=None):
        if not prepared._is_plain(q, k, v):
            return None
        choose = lambda q, k: dx.select_blocks(q, k, rule, block_size=layout.block_size, scale=scale)
        call = lambda given, q, k, v, sinks: (
            dx.sparse_attention(q, k, v, choose(q, k), scale=scale, softcap=softcap, sinks=sinks),
        )
        return prepared.Prepared(q, k, v, "cpu", call, None, ())

    monkeypatch.setattr(prepared, "_repeats", prepared._is_plain)
    monkeypatch.setattr(sparse, "prepare_rule", prepare_rule)
    call = lambda self, q, k, v, sinks: self._call(self._persistent, q, k, v, sinks, *self._settings)[0]
    monkeypatch.setattr(prepared.Prepared, "__call__", call)
    found, repeat = [], layers.Layer._repeat

    def watched(self, *given):
        out, drawn = repeat(self, *given)
        found.append(out is not None)
        return out, drawn

    run = repeats.RepeatedCall.__call__

    def watched_run(self, *given):
        out = run(self, *given)
        found.extend([True] if out is not None else [])  # otherwise the call is planned
        return out

    monkeypatch.setattr(layers.Layer, "_repeat", watched)
    monkeypatch.setattr(repeats.RepeatedCall, "__call__", watched_run)
    with use(Recorder()) as telemetry:
        yield found, telemetry


@pytest.mark.parametrize("name", [*RULES, "own_pattern"])
def test_later_layers_and_passes_repeat_a_call(name, repeated):
    found, telemetry = repeated
    model = llama()
    policy = None if name == "own_pattern" else policy_for(model, dx.Rule.of(RULES[name]))
    prompts = [tokens(2, seqlen) for seqlen in (300, 290, 300)]
    with dx.apply(model, policy), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.Layer, "_repeat", lambda self, *given: (None, None))
        patch.setattr(sparse, "prepare", lambda *given: None)
        wanted = [logits(model, input_ids=ids) for ids in prompts]
    with dx.apply(model, policy) as handle:
        handle.counts.probe.sample_rate = 0.0
        for ids, expected in zip(prompts, wanted, strict=True):
            assert torch.equal(logits(model, input_ids=ids), expected)
        assert found == [False, True, True] * 2 + [True] * 3
        kind, backend = ("own_pattern_calls", "own_pattern") if name == "own_pattern" else ("sparse_calls", "cpu")
        assert handle.stats()[kind] == 9
        assert telemetry.value("dynaxx_layer_calls_total", backend=backend, phase="prefill") == 18


def test_sampled_calls_between_repeated_ones_lose_no_counts(repeated):
    _, telemetry = repeated
    model, ids = llama(), tokens(1, 300)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        handle.counts.probe.sample_rate, handle.counts.probe.spacing = 0.5, 0.0
        for _ in range(10):
            logits(model, input_ids=ids)
        assert handle.stats()["sparse_calls"] == 30
        assert telemetry.value("dynaxx_layer_calls_total", phase="prefill") == 30


def test_calls_that_need_the_layout_are_not_repeated(repeated):
    found, telemetry = repeated
    model, ids, seen = llama(), tokens(1, 300), []
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        handle.counts.probe.sample_rate = 0.0
        logits(model, input_ids=ids)
        handle.watchers.append(lambda layer, layout: seen.append(layer))
        logits(model, input_ids=ids)
        assert seen == [0, 1, 2]
        handle.watchers.clear()
        handle.faults.append(seen.append)
        logits(model, input_ids=ids)
        assert seen == [0, 1, 2] * 2
        handle.faults.clear()
        model(input_ids=ids).logits.sum().backward()
        assert found == [False, True, True] + [False] * 7
        found.clear()
        with torch.autocast("cpu", torch.bfloat16):
            logits(model, input_ids=ids)
        assert found == [False, True, True]  # other dtypes are another call
        handle.counts.probe.sample_rate, handle.counts.probe.spacing = 1.0, 0.0
        logits(model, input_ids=ids)
        assert found[3:] == [False] * 3
        assert telemetry.value("dynaxx_selection_seconds") > 0
        assert handle.stats()["sparse_calls"] == 18


def test_a_guard_samples_repeated_calls_once(repeated):
    found, telemetry = repeated
    model, ids = llama(), tokens(1, 300)
    policy = policy_for(model, dx.Rule.of(SPARSE), guard=Guard(sample=0.5, min_recall=0.0))
    with dx.apply(model, policy) as handle:
        handle.background.patient, handle.counts.probe.sample_rate = True, 0.0
        for _ in range(40):
            logits(model, input_ids=ids)
        handle.wait()
        assert 30 < telemetry.value("dynaxx_guard_checks_total") < 90
        assert 30 < sum(found) < 90
        assert handle.stats()["sparse_calls"] == 120


def test_a_failing_call_makes_its_layer_dense(repeated, monkeypatch):
    model, ids = llama(), tokens(1, 300)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        logits(model, input_ids=ids)

        def fails(self, *given):
            raise RuntimeError("no kernel")

        monkeypatch.setattr(prepared.Prepared, "__call__", fails)
        handle.counts.probe.sample_rate = 0.0
        logits(model, input_ids=ids)
        assert handle.stats()["dense_calls"] == {"kernel failed": 3}


def test_a_replaced_policy_has_its_own_calls(repeated):
    found, model, ids = repeated[0], llama(), tokens(1, 300)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        handle.counts.probe.sample_rate = 0.0
        before = logits(model, input_ids=ids)
        handle.replace(policy_for(model, dx.Rule.of(dx.SlidingWindow(24) | dx.TopK(0.8))))
        assert not torch.equal(logits(model, input_ids=ids), before)
        assert found == [False, True, True] * 2
