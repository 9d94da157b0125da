# SPDX-License-Identifier: Apache-2.0
"""Drift is found within the stated delay and not without a change; a policy is renewed from the records."""

import json

import pytest
import torch

import dynaxx as dx
from dynaxx.policy import Drift, DriftDetector, ModelFacts, Policy, Profile, Rule
from dynaxx.policy.drift import critical_distance, ks_distance, ks_p_value, stability_index
from dynaxx.policy.profile import BINS, EDGES, STATISTICS, LayerRecord, midpoints

LAYERS, HEADS = 6, 4


def draw(generator, shift=0.0, heads=HEADS):
    """Draw shares (statistics, heads) of one call, around 0.7."""
    noise = torch.randn(len(STATISTICS), heads, generator=generator) * 0.5
    return torch.sigmoid(0.8 + shift + noise)


def reference(seed=0, calls=200):
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer in range(LAYERS):
        record = LayerRecord(HEADS)
        for _ in range(calls):
            record.add(draw(generator))
        layers.append(record.to_profile(layer))
    return Profile(layers=tuple(layers))


def run(detector, generator, calls, shift=lambda call, layer: 0.0):
    """Return the first call at which a layer has drifted, and that layer."""
    for call in range(calls):
        for layer in range(LAYERS):
            found = detector.add(layer, draw(generator, shift(call, layer)))
            if found is not None and found.drifted:
                return call, found
    return None


# ---- the statistic -----------------------------------------------------------------------------------------------


def test_p_values_are_kolmogorovs():
    """p-values agree with the table of the limiting distribution (Smirnov 1948)."""
    for at, p in ((0.828, 0.4999), (1.224, 0.0999), (1.358, 0.05), (1.628, 0.00998), (1.949, 0.001)):
        root = 1e4  # large samples: no correction to speak of
        assert ks_p_value(at / root, 2 * 10**8, 2 * 10**8) == pytest.approx(p, rel=2e-2)
    assert ks_p_value(0.0, 64, 64) == 1.0
    assert ks_p_value(1.0, 64, 200) < 1e-20
    assert 0 < ks_p_value(0.3, 64, 200) < ks_p_value(0.2, 64, 200) < 1


def test_the_critical_distance_is_where_the_p_value_is():
    for p in (0.05, 1e-3, 1e-6):
        distance = critical_distance(p, 200, 64)
        assert ks_p_value(distance, 200, 64) <= p < ks_p_value(distance - 1e-3, 200, 64)
    assert critical_distance(1e-30, 3, 3) == 1.0


def test_the_test_keeps_its_level():
    """At most 5 % of 2,000 pairs of samples from one distribution are rejected at the level of 5 %, up to chance."""
    generator = torch.Generator().manual_seed(3)
    rejected = 0
    for _ in range(500):
        values = draw(generator, heads=4 * 264).view(len(STATISTICS), 4, 264)[0]
        counts = torch.nn.functional.one_hot(torch.bucketize(values, EDGES), BINS)
        far = ks_distance(counts[:, :200].sum(1), counts[:, 200:].sum(1))
        rejected += sum(ks_p_value(float(each), 200, 64) <= 0.05 for each in far)
    assert 20 < rejected <= 100 + 3 * (2000 * 0.05 * 0.95) ** 0.5


def test_bins_are_finer_at_the_ends_and_count_everything():
    assert len(EDGES) == BINS - 1
    record = LayerRecord(1)
    for value in (-0.1, 0.0, 0.5, 1.0, 1.1):  # rounding may leave [0, 1]
        record.add(torch.full((len(STATISTICS), 1), value))
    counts = record.counts[0, 0]
    assert (int(counts[0]), int(counts[-1]), int(counts.sum())) == (2, 2, 5)
    assert float(midpoints()[-1]) > 0.995
    assert stability_index(counts, counts) == 0.0
    assert stability_index(counts, counts.flip(0) + torch.arange(BINS)) > 0.25


# ---- the detector ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_no_alarm_where_nothing_changes(seed):
    """40 windows of every layer raise no alarm: the bound per pair of windows is 1e-6."""
    detector = DriftDetector(reference(), Drift(window=32))
    assert run(detector, torch.Generator().manual_seed(100 + seed), 32 * 40) is None


def test_single_rounds_keep_their_bound():
    """With a bound of 20 % per round, at most about 6 of 30 rounds report a change."""
    detector = DriftDetector(reference(), Drift(window=32, false_alarms=0.2, confirm=1, min_distance=0.0))
    generator, rounds = torch.Generator().manual_seed(5), 0
    for _ in range(30):
        found = [detector.add(layer, draw(generator)) for _ in range(32) for layer in range(LAYERS)]
        rounds += any(each is not None and each.evidence for each in found)
    assert rounds <= 12


@pytest.mark.parametrize("start", [0, 31, 100])
def test_a_change_is_found_within_the_stated_delay(start):
    settings = Drift(window=32)
    detector = DriftDetector(reference(), settings)
    shift = lambda call, layer: 1.2 if layer == 3 and call >= start else 0.0
    call, found = run(detector, torch.Generator().manual_seed(7), 500, shift)
    assert found.layer == 3
    assert call - start < (settings.confirm + 1) * settings.window
    worst = found.evidence[0]
    assert worst.running_mean > worst.reference_mean
    assert worst.p_value < 1e-4
    assert worst.stability_index > 0.25
    assert "layer 3 head" in str(worst)
    assert detector.drifted.keys() == {3}


def test_drift_that_ends_is_forgotten():
    detector = DriftDetector(reference(), Drift(window=32))
    run(detector, torch.Generator().manual_seed(7), 500, lambda call, layer: 1.5 * (layer == 1))
    assert detector.drifted
    run(detector, torch.Generator().manual_seed(8), 64)
    assert not detector.drifted


def test_layers_that_the_reference_lacks_are_not_compared():
    detector = DriftDetector(reference(), Drift(window=1, confirm=1))
    assert detector.add(99, torch.zeros(len(STATISTICS), HEADS)) is None


# ---- in a policy -------------------------------------------------------------------------------------------------


def test_a_reference_survives_its_file_and_wrong_ones_are_refused(tmp_path):
    facts = ModelFacts(model_type="llama", layers=LAYERS, q_heads=HEADS, kv_heads=2, head_dim=16)
    policy = Policy(model=facts, rules=(Rule.of(dx.SlidingWindow(16)),), reference=reference(calls=5))
    dx.save_policy(policy, tmp_path / "policy.json")
    assert dx.load_policy(tmp_path / "policy.json") == policy
    text = json.loads((tmp_path / "policy.json").read_text())
    text["reference"]["layers"][2]["entropy"][1] = [1] * BINS
    (tmp_path / "policy.json").write_text(json.dumps(text))
    with pytest.raises(dx.PolicyError, match=r"`reference.layers.2`: the counts of each histogram of `entropy`"):
        dx.load_policy(tmp_path / "policy.json")
    with pytest.raises(dx.PolicyError, match=r"`reference` must have 2 q heads .*got 4 in layer 0"):
        Policy(model=facts.model_copy(update={"q_heads": 2}), reference=reference(calls=1))
