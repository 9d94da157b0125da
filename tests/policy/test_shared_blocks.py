# SPDX-License-Identifier: Apache-2.0
"""A policy's `shared`: layers that read the blocks of earlier layers."""

import pytest
import torch

import dynaxx as dx
from dynaxx.policy import ModelFacts, Policy, Rule, SharedChoice, load_policy, resolve, rules_digest, save_policy
from dynaxx.policy.diff import diff
from dynaxx.policy.resolve import BlockSource, selection_sources

FACTS = ModelFacts(model_type="llama", layers=4, q_heads=3, kv_heads=1, head_dim=16)
EACH = (Rule.of(dx.Sink(16) | dx.TopK((0.1, 0.2, 0.4))),)
SHARED = (SharedChoice(layer=1, source=0, heads=(2, 0, 0)), SharedChoice(layer=3, source=2, heads=(0, 1, 2)))


def policy(rules=EACH, **fields):
    return Policy(model=FACTS, rules=rules, **{"block_size": 16, "shared": SHARED, **fields})


def test_it_survives_its_file_and_changes_the_digest(tmp_path):
    save_policy(policy(), tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy()
    alone = policy(shared=())
    assert policy().shares_choices
    assert not alone.shares_choices
    assert rules_digest(policy()) != rules_digest(alone)
    assert [field for field, *_ in diff(alone, policy()).fields] == ["shared"]


def test_sources_name_readers_and_those_that_they_read():
    plans = resolve(policy())
    found = selection_sources(plans, 1, SHARED)
    assert found == {
        0: BlockSource(0), 1: BlockSource(0, (2, 0, 0)), 2: BlockSource(2), 3: BlockSource(2, (0, 1, 2)),
    }  # fmt: skip
    assert selection_sources(plans, 1) == {}
    assert selection_sources(plans, 3) == {i: BlockSource(0) for i in range(3)} | {3: BlockSource(3)}


@pytest.mark.parametrize(
    ("shared", "fields", "message"),
    [
        ([(1, 1, (0, 1, 2))], {}, "`shared.0`: `source` must be a layer before layer 1, got 1"),
        ([(4, 0, (0, 1, 2))], {}, "`shared.0.layer` must be below 4"),
        ([(1, 0, (0, 1))], {}, "`shared.0.heads` must be 3 q heads, each below 3"),
        ([(1, 0, (0, 1, 3))], {}, "`shared.0.heads` must be 3 q heads, each below 3"),
        ([(1, 0, (0, 1, 2)), (1, 0, (0, 1, 2))], {}, "`shared.1.layer` must not repeat a layer, got 1"),
        ([(1, 0, (0, 1, 2)), (2, 1, (0, 1, 2))], {}, "layer 1 is in `shared` itself"),
        ([(1, 0, (0, 1, 2))], {"reuse": 2}, "`reuse` must be 1 with `shared`"),
        ([(2, 0, (0, 1, 2))], {"rules": (Rule.of(dx.TopK(0.1), layers=[0]),)}, "needs a prefill rule in layer 2"),
        (
            [(1, 0, (0, 1, 2))],
            {"rules": (Rule.of(dx.TopK(0.1), layers=[0], block_size=32), Rule.of(dx.TopK(0.1), layers=[1]))},
            "needs one block size in layers 1 and 0",
        ),
    ],
)
def test_sharing_that_makes_no_sense_is_refused(shared, fields, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        policy(shared=tuple({"layer": a, "source": b, "heads": c} for a, b, c in shared), **fields)


def test_taken_layouts_are_those_of_the_heads():
    plan = resolve(policy())[0]
    q, k = torch.randn(2, 1, 100, 3, 16)
    layout = plan.layout(q, k[:, :, :1])
    assert torch.equal(plan.taken(layout, (2, 0, 0)).to_dense(), layout.to_dense()[:, [2, 0, 0]])
