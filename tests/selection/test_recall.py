# SPDX-License-Identifier: Apache-2.0
"""Recall equals that of the dense map, and its interval covers the true value."""

import pytest
import torch

import dynaxx as dx
from dynaxx.selection.recall import _estimate, student_t
from dynaxx.testing import make_qkv


def direct(q, k, layout, causal=True):
    """Return the recall (batch, heads, rows that see anything), from the dense map."""
    scores = q.transpose(1, 2) @ k.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2).transpose(-1, -2)
    scores = scores.double() * q.shape[-1] ** -0.5
    dense = torch.ones(scores.shape[-2:], dtype=torch.bool)
    dense = dense.tril(k.shape[1] - q.shape[1]) if causal else dense
    share = scores.masked_fill(~dense, -torch.inf).softmax(-1)
    return share.masked_fill(~layout.to_dense(), 0.0).sum(-1)[..., dense.any(-1)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (129, 129), (65, 257), (130, 70)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rule", [dx.SlidingWindow(20) | dx.Sink(3), dx.TopK(0.3), dx.Dilated(5, 3)], ids=repr)
def test_all_rows_are_exact(seqlen_q, seqlen_k, causal, rule):
    q, k, _ = make_qkv(2, seqlen_q, seqlen_k, 6, 2, 16)
    layout = dx.select_blocks(q, k, rule, block_size=(16, 32), causal=causal)
    want = direct(q, k, layout, causal)
    got = dx.recall(q, k, layout, causal=causal, rows=seqlen_q + 1)
    assert got.low == got.mean == got.high == pytest.approx(float(want.mean()), abs=1e-5)
    torch.testing.assert_close(got.per_head, want.mean((0, 2)).float(), rtol=0, atol=1e-5)


def test_a_batch_without_sequences_loses_nothing():
    q, k = torch.randn(0, 70, 4, 16), torch.randn(0, 70, 2, 16)
    found = dx.recall(q, k, dx.SlidingWindow(5).layout(70))
    assert (found.mean, found.low, found.high, found.per_head.tolist()) == (1.0, 1.0, 1.0, [1.0] * 4)


def test_dense_and_empty():
    q, k, _ = make_qkv(1, 300, 300, 2, 1, 16)
    dense = dx.recall(q, k, dx.Causal().layout(300, block_size=16), rows=50)
    assert dense[:3] == pytest.approx((1.0, 1.0, 1.0))
    nothing = dx.BlockLayout.from_dense(torch.zeros(300, 300, dtype=torch.bool), block_size=16)
    assert dx.recall(q, k, nothing, rows=50)[:3] == (0.0, 0.0, 0.0)
    assert dx.recall(q[:, :0], k, dx.Causal().layout(0, 300, block_size=16)).mean == 1.0


def test_the_interval_covers_the_truth():
    q, k, _ = make_qkv(2, 600, 600, 4, 2, 16)
    layout = (dx.SlidingWindow(100) | dx.Sink(16)).layout(600, block_size=16)
    truth = dx.recall(q, k, layout, rows=600).mean
    found = [dx.recall(q, k, layout, rows=40, seed=seed) for seed in range(100)]
    assert len({each.mean for each in found}) == 100
    assert found[7].mean == dx.recall(q, k, layout, rows=40, seed=7).mean
    assert 89 <= sum(each.low <= truth <= each.high for each in found) <= 100  # 95 expected; below 89: 1 in 200


@pytest.mark.parametrize("count", [5, 20, 100])
def test_coverage_on_populations_of_known_mean(count):
    random = torch.Generator().manual_seed(0)
    population = torch.rand(200, generator=random) ** 0.5
    truth, caught = float(population.double().mean()), 0
    for _ in range(1000):
        some = population[torch.randperm(200, generator=random)[:count]]
        found = _estimate(some[:, None, None], 200)
        caught += found.low <= truth <= found.high
    assert (905 if count == 5 else 925) <= caught <= 975  # five of a skewed population: a little less


def test_quantiles_of_students_t():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 255: 1.969}
    for freedom, quantile in table.items():
        assert student_t(freedom) == pytest.approx(quantile, abs=0.02 if freedom == 3 else 0.006)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda q, k, s: dx.recall(q, k, s, rows=1), "`rows` must be >= 2"),
        (lambda q, k, s: dx.recall(q, k, s, scale=float("nan")), "`scale` must be 0 or"),
        (lambda q, k, s: dx.recall(q[:, 1:], k, s), "`layout` must have lengths"),
        (lambda q, k, s: dx.recall(q[..., :8], k, s), "`q` and `k` must be"),
        (lambda q, k, s: dx.recall(q[:, :, :2], k, dx.select_blocks(q, k, dx.TopK(1))), "`layout` must be shared"),
    ],
)
def test_bad_input_is_refused(build, message):
    q, k, _ = make_qkv(1, 64, 64, 4, 2, 16)
    with pytest.raises(ValueError, match=message):
        build(q, k, dx.Causal().layout(64, block_size=16))
