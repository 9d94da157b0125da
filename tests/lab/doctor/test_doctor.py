# SPDX-License-Identifier: Apache-2.0
"""doctor asks every backend, checks those that can serve, and survives broken ones."""

import json
from types import SimpleNamespace

import pytest
import torch

from dynaxx.lab.doctor import run as doctor
from dynaxx.ops import dispatch


@pytest.fixture
def only_reference(monkeypatch):
    """Use the reference only, because other backends have their own tests and take time."""
    monkeypatch.setattr(doctor, "BACKENDS", ("reference",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sound_backend_passes(only_reference, dtype):
    found = doctor.diagnose(q_heads=6, kv_heads=2, head_dim=24, seqlen=100, dtype=dtype, block_size=16, full=True)
    assert found.ok, found.summary()
    assert found.chosen == {"forward": "reference", "gradients": "reference"}
    assert {(check.what, len(check.reports)) for check in found.checks} == {("forward", 2), ("gradients", 3)}
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["checked_seqlen"] == 100
    assert "all checks passed" in found.summary()


def test_every_backend_answers():
    found = doctor.diagnose(q_heads=2, kv_heads=1, head_dim=16, seqlen=64, block_size=16)
    assert {backend.name for backend in found.backends} == set(dispatch.BACKENDS)
    for backend in found.backends:
        assert not backend.broken, backend
    assert found.ok, found.summary()


def test_long_problems_are_checked_shorter_and_say_so(only_reference, monkeypatch):
    monkeypatch.setattr(doctor, "ORACLE_BYTES", 8 * 2 * 50**2)
    found = doctor.diagnose(q_heads=2, kv_heads=1, head_dim=16, seqlen=300, block_size=16, full=True)
    assert found.problem.seqlen_q == 300
    assert found.checked_seqlen == 50
    assert "at 50 tokens (the oracle is quadratic)" in found.summary()


def test_the_first_answer_is_quick_and_says_what_it_left_out(only_reference):
    said = []
    found = doctor.diagnose(q_heads=2, kv_heads=1, head_dim=16, seqlen=4096, block_size=16, say=said.append)
    assert said == ["auto picks reference for this problem, reference for its gradients"]
    assert (found.checked_seqlen, found.full) == (64, False)
    assert "at 64 tokens (longer ones: --full)" in found.summary()


def fake(monkeypatch, **functions):
    monkeypatch.setattr(doctor, "BACKENDS", ("triton",))
    monkeypatch.setattr("dynaxx.kernels.registry._imported", lambda name: SimpleNamespace(**functions))
    return doctor.diagnose(q_heads=2, kv_heads=1, head_dim=16, seqlen=64, block_size=16)


def zeros(q, k, v, layout, scale):
    return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def test_a_wrong_backend_fails(monkeypatch):
    found = fake(monkeypatch, unsupported_reasons=lambda problem: ["no"] * problem.needs_grad, attention_forward=zeros)
    assert not found.ok
    assert found.chosen["gradients"] == ""
    assert "FAIL  triton     forward" in found.summary()
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_crash_in_a_kernel_is_a_finding(monkeypatch):
    found = fake(monkeypatch, unsupported_reasons=lambda problem: [])
    assert not found.ok
    assert "AttributeError" in found.summary()


def test_a_backend_that_cannot_answer_is_broken(monkeypatch):
    found = fake(monkeypatch)
    assert not found.ok
    assert "broken: AttributeError" in found.summary()
    assert "no backend can serve" in found.summary()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"q_heads": 3, "kv_heads": 2}, "multiple"), ({"seqlen": 0}, "at least 1"), ({"block_size": 17}, "17")],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        doctor.diagnose(**sizes)
