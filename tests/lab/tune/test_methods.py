# SPDX-License-Identifier: Apache-2.0
"""benchmarks/quality/task_policies.py builds the policies that it says: scorers by head, densities."""

from types import SimpleNamespace

import pytest
import torch

import dynaxx as dx
from dynaxx.lab.tune.costs import Costs
from dynaxx.selection import TileQueries
from example_scripts import ROOT, import_script
from tiny import save_tiny_model

TOKENS = 256
policies, scores = (import_script(ROOT / "benchmarks" / "quality", name) for name in ("task_policies", "task_scores"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("transformers")
    from dynaxx.lab.models import load_model

    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("tiny"))), device="cpu").model


def arguments(**given):
    plain = {"tokens": TOKENS, "scorers": "mean", "fine": True, "floor": 0.5, "local": 64, "last": 16, "block_size": 16}
    return SimpleNamespace(**(plain | given))


def test_each_head_takes_the_scorer_that_loses_least(model):
    args = arguments(scorers="mean,anti 16")
    ids = torch.randint(3, 300, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    plain = policies.head_costs(model, ids, policies.candidate_rules(args), args.block_size)
    costs = policies.costs_from(plain)
    heads, budgets = model.config.num_attention_heads, len(policies.FINE_BUDGETS)
    assert costs.loss[dx.MeanQuery()].shape == (2 * budgets, heads * len(costs.layers))
    loss = costs.loss[dx.MeanQuery()].clone()
    loss[budgets:, ::2] *= 1e-3  # of even heads under anti-diagonals
    loss[:budgets, 1::2] *= 1e-3
    costs = Costs(costs.layers, costs.density, {dx.MeanQuery(): loss})
    policy, density = policies.tuned_policy(model, costs, args, 0.85)
    partly = []
    for rule in policy.rules:
        selector = rule.attention.build().selector
        for head, budget in zip(rule.head_list(heads), selector.budget, strict=True):
            if 0 < budget < 1:
                partly.append(head)
                assert type(selector.scorer) is (dx.AntiDiagonal, dx.MeanQuery)[head % 2]
    assert {head % 2 for head in partly} == {0, 1}
    assert policies.policy_density(policy, TOKENS) == pytest.approx(density, abs=1e-6)
    seen = []
    with scores.attention_of(model, policy) as handle, handle.watch(lambda _, layout: seen.append(layout.density())):
        model(ids[:, :-1])
    assert sum(seen) / len(seen) == pytest.approx(density, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "scorer"),
    [
        ("mean", dx.MeanQuery()),
        ("mean 1", dx.MeanQuery(sharpness=1.0)),
        ("tile 8", TileQueries(8)),
        ("anti 16", dx.AntiDiagonal(16)),
        ("bounds", dx.MinMax()),
    ],
)
def test_scorers_have_names(name, scorer):
    assert policies.scorer_named(name) == scorer


def test_sizes_of_blocks_are_read():
    assert (policies.block_size("32"), policies.block_size("16x32")) == (32, (16, 32))
    with pytest.raises(ValueError, match="block_size"):
        policies.block_size("24")


@pytest.mark.parametrize("block", [32, (32, 16)])
def test_rules_are_those_of_tune_by_default(block):
    from dynaxx.lab.tune.costs import rule_of

    args = arguments(block_size=block, local=128, last=64)
    floor = TOKENS // (block if isinstance(block, int) else block[1]) // 2
    assert policies.budget_rule(args, dx.MeanQuery(), 0.1) == rule_of(dx.MeanQuery(), 0.1, block, 64, floor)
