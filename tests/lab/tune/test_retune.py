# SPDX-License-Identifier: Apache-2.0
"""A policy renewed from records restores the recall of each head, changes nothing else, and shows the difference."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

import dynaxx as dx
from dynaxx.cli import app
from dynaxx.policy import Guard, Policy, load_profile, rules_digest, save_profile
from dynaxx.policy.diff import diff
from dynaxx.policy.profile import LADDER
from dynaxx.policy.renew import mean_recall, renew
from dynaxx.policy.resolve import head_rules

pytest.importorskip("transformers")
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.models import load_model
from dynaxx.lab.tune.retune import record, retune
from tiny import TEXT, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def policy(loaded):
    """Return a policy: layer 0 selects by head, layer 1 has a head with a window and a dense head."""
    rules = (
        dx.Rule.of(dx.Sink(2) | dx.TopK((0.1, 0.2, 0.3)), layers=[0], heads=(0, 1, 3)),
        dx.Rule.of(dx.SlidingWindow(32), layers=[1], heads=(0, 1, 2)),
    )
    return Policy(model=model_facts(loaded.model), rules=rules, block_size=16)


@pytest.fixture(scope="module")
def seen(policy, loaded):
    return record(policy, loaded, TEXT, requests=12, lengths=(128, 200))


def with_ladder(profile, change):
    layers = [each.model_copy(update={"ladder": change(each)}) for each in profile.layers]
    return profile.model_copy(update={"layers": tuple(layers)})


def test_every_call_is_recorded(seen):
    assert [(each.layer, each.calls, each.ladder_calls) for each in seen.layers] == [(0, 12, 3), (1, 12, 3)]
    assert [row[-1] for row in seen.layers[1].ladder][3] == pytest.approx(1.0, abs=1e-3)  # the dense head
    assert seen.requests == 12
    for each in seen.layers:  # the ladder's middle and the histogram say the same, up to sampling and bins
        counts = each.model_copy(update={"ladder": ()})
        for exact, rough in zip(mean_recall(each), mean_recall(counts), strict=True):
            assert abs(exact - rough) < 0.12


def test_recording_twice_is_the_same(policy, loaded, seen):
    assert record(policy, loaded, TEXT, requests=12, lengths=(128, 200)).layers == seen.layers


def test_heads_that_lost_recall_get_more_and_others_nothing(policy, seen):
    seen = seen.model_copy(update={"layers": tuple(x.model_copy(update={"ladder_calls": 9}) for x in seen.layers)})
    reference = seen
    at = LADDER.index(1.0)

    def lost(layer):
        if layer.layer:
            return layer.ladder
        rows = [list(row) for row in layer.ladder]
        rows[1] = [0.2 * rows[1][at] * (1 + i) for i in range(len(LADDER))]  # the goal lies between two steps
        rows[3] = [0.1] * len(LADDER)  # nothing helps
        return tuple(map(tuple, rows))

    old = policy.replace(reference=reference)
    new, renewals = renew(old, with_ladder(seen, lost), command="a test")
    assert [(each.layer, each.head) for each in renewals] == [(0, 1), (0, 3)]
    before, after = head_rules(old), head_rules(new)
    assert after[0][0] == before[0][0]
    assert after[0][1].selector.budget > before[0][1].selector.budget
    assert after[0][3].selector.budget == 1.0
    assert math.isinf(renewals[1].factor)
    assert after[1] == before[1]
    assert [each.layer for each in new.reference.layers] == [1]
    assert new.evidence[-1].command == "a test"
    same, none = renew(old, seen)
    assert same is old
    assert none == []


def test_windows_grow_as_a_whole(policy, seen):
    recorded = seen.model_copy(update={"layers": tuple(x.model_copy(update={"ladder_calls": 9}) for x in seen.layers)})
    ladder = ((0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 0.9, 1.0),) * 4
    recorded = with_ladder(recorded, lambda layer: ladder if layer.layer else layer.ladder)
    decode = dx.Rule.of(dx.Sink(16) | dx.TopK(0.1), phase="decode")
    policy = policy.replace(rules=(*policy.rules, decode))
    new, _ = renew(policy, recorded.model_copy(update={"policy": rules_digest(policy)}), recall=0.605)
    assert new.rules[-1] == decode
    assert head_rules(new)[1][0] == dx.SlidingWindow(48)


def test_records_of_other_rules_and_missing_goals_are_refused(policy, seen):
    with pytest.raises(dx.PolicyError, match="recorded under other rules"):
        renew(policy.replace(block_size=32), seen, recall=0.9)
    with pytest.raises(dx.PolicyError, match=r"`reference` is empty.*--record"):
        renew(policy, seen)
    with pytest.raises(ValueError, match="one source of statistics, --stats FILE or --model MODEL"):
        retune(policy)


def test_recording_needs_lengths_at_which_it_is_sparse(policy, loaded):
    with pytest.raises(ValueError, match=r"lengths must be from 500 .*, got 400"):
        record(policy.replace(dense_below=500), loaded, TEXT, lengths=[400])
    with pytest.raises(ValueError, match=r"no layer ran sparse \(the policy has no rules\)"):
        record(policy.replace(rules=()), loaded, TEXT, lengths=[100], requests=1)


def test_a_difference_names_fields_and_heads(policy, seen):
    new = policy.replace(
        rules=(dx.Rule.of(dx.SlidingWindow(64), layers=[1], heads=(0, 1)),),
        rollout={"share": 0.5}, guard=Guard(), reference=seen,
    )  # fmt: skip
    found = diff(policy, new)
    assert ("rollout.share", 1.0, 0.5) in found.fields
    assert [(each.layer, each.head) for each in found.heads] == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 2)]
    text = found.summary()
    assert "prefill, layer 1 heads 0,1:\n  - SlidingWindow(window=32)\n  + SlidingWindow(window=64)" in text
    assert "+ dense\n" in text
    assert "reference differs" in text
    assert json.loads(json.dumps(found.to_dict()))["heads"][0]["layer"] == 0
    assert diff(policy, policy).same
    assert diff(policy, policy).summary() == "no difference"


def test_the_commands(folder, policy, seen, tmp_path):
    def dynaxx(*words, code=0):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    old, new, text = tmp_path / "policy.json", tmp_path / "new.json", tmp_path / "text.txt"
    text.write_text(TEXT)
    dx.save_policy(policy, old)
    common = ("--model", folder, "--text", text, "--requests", 16, "--lengths", "128,200", "--quiet")
    said = dynaxx("retune", old, *common, "--record", "--out", new)
    assert "reference differs" in said
    referenced = dx.load_policy(new)
    assert referenced.replace(reference=None) == policy
    assert [each.calls for each in referenced.reference.layers] == [16, 16]
    save_profile(referenced.reference, tmp_path / "statistics.json")
    assert load_profile(tmp_path / "statistics.json") == referenced.reference
    stats = ("--stats", tmp_path / "statistics.json")
    found = json.loads(dynaxx("retune", new, *stats, "--json"))
    assert found["changed"] is False
    found = json.loads(dynaxx("retune", old, *stats, "--recall", 0.9, "--out", new, "--json"))
    assert found["changed"] is True
    assert {each["layer"] for each in found["diff"]["heads"]} == {0, 1}
    assert "prefill, layer 0" in dynaxx("diff", old, new)
    assert "--stats FILE or --model" in dynaxx("retune", old, code=2)
    (tmp_path / "statistics.json").write_text("{")
    assert "is not a file of statistics" in dynaxx("retune", old, *stats, code=2)


def test_a_renewed_policy_runs(policy, loaded):
    found = retune(policy, loaded=loaded, text=TEXT, requests=16, lengths=[128], recall=0.95)
    assert found.recorded
    assert [each.layer for each in found.policy.reference.layers] == [0, 1]
    with dx.apply(loaded.model, found.policy) as handle, torch.no_grad():
        loaded.model(torch.ones(1, 128, dtype=torch.int64))
        assert handle.stats()["sparse_calls"] >= 1
