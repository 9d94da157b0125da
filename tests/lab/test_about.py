# SPDX-License-Identifier: Apache-2.0
"""Digests of what a result is about, and the bars of a command with a time budget."""

import io
from types import SimpleNamespace

import pytest
import torch

import dynaxx as dx
from dynaxx.lab.about import about, differing
from dynaxx.lab.progress import BudgetProgress, LineProgress
from dynaxx.lab.time_budget import TimeBudget
from slow_clock import SlowClock
from tiny import llama


def policy_of(**fields):
    from dynaxx.integrations.transformers.apply_policy import model_facts

    rules = (dx.Rule.of(dx.SlidingWindow(16)),)
    return dx.Policy(**{"model": model_facts(llama()), "block_size": 16, "rules": rules, **fields})


def test_digests_change_with_what_a_result_is_about():
    pytest.importorskip("transformers")
    model = llama()
    first = {"about": about(model, "text", policy_of(), tokens=512)}
    assert set(first["about"]) == {"model", "text", "policy", "settings"}
    evidence = (dx.policy.Evidence(what="a run", command="dynaxx tune", values={}),)
    again = {"about": about(model, "text", policy_of(evidence=evidence), tokens=512)}
    assert differing(first, again) == [], "evidence does not change what a policy does"
    assert differing(first, {"about": about(model, "other", policy_of(), tokens=512)}) == ["text"]
    assert differing(first, {"about": about(model, "text", policy_of(dense_below=8), tokens=512)}) == ["policy"]
    assert differing(first, {"about": about(policy=policy_of(rules=()), tokens=256)}) == ["policy", "settings"]
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    assert differing(first, {"about": about(model)}) == ["model"]
    assert differing(first, {}) == [], "a document of an earlier version has no digests"


def test_the_estimate_follows_the_budget():
    clock, said = SlowClock(), io.StringIO()
    progress = BudgetProgress(LineProgress(said, interval=0.0), TimeBudget(100.0, clock))
    with progress.task("Tuning", 7) as outer, progress.task("Measuring", total=30) as inner:
        clock.seconds = 25.0
        inner.advance(1, "layer 29")
        outer.advance(0, "trying 60 %; so far nothing")
    lines = said.getvalue().splitlines()
    assert any(line.startswith("Tuning: ") and ", 25%, about" in line for line in lines)
    assert any("trying 60 %; so far nothing" in line for line in lines)
    assert not any("left" in line for line in lines if line.startswith("Measuring")), "inner steps have no estimates"


def test_expected_seconds_grow_with_the_length():
    time = TimeBudget(100.0, clock := SlowClock())
    assert time.expects("pass", 512) == 0.0
    time.learn("pass", 512, 4.0)
    assert time.expects("pass", 128) == 1.0
    assert time.expects("pass", 2048) == pytest.approx(4.0 * 4**1.25)
    with time.reserving(lambda: 50.0):
        assert time.allows(40.0)
        assert not time.allows(50.0)
        assert time.allows(50.0, urgent=True)
        with time.reserving_only():
            assert time.allows(80.0)
        with time.reserving_only(lambda: 20.0):
            assert not time.allows(80.0)
    clock.seconds = 101.0
    assert not time.allows()
    assert TimeBudget(None, SimpleNamespace(now=lambda: 0.0)).allows(1e9)
