# SPDX-License-Identifier: Apache-2.0
"""Layers that read the blocks of earlier layers: which ones, with which budgets, at which cost."""

from itertools import combinations

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.lab.tune import sharing
from dynaxx.lab.tune.costs import BUDGETS, rule_of
from dynaxx.lab.tune.sensitivity import measure_head_costs
from dynaxx.policy import Policy, resolve

transformers = pytest.importorskip("transformers")
LAYERS, HEADS, BLOCK = 5, 4, 16


def rule(budget):
    return rule_of(dx.MeanQuery(), budget, BLOCK, 16, 4)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 64, (1, 385), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def costs(model, ids):
    alike = sharing.likeness(model, ids, dx.MeanQuery(), rule(0.0), BLOCK)
    return sharing.shared_costs(model, ids, rule, sharing.matched(alike, 3), block_size=BLOCK)


def test_a_head_is_most_alike_itself(model, ids):
    alike = sharing.likeness(model, ids, dx.MeanQuery(), rule(0.0), BLOCK)
    assert alike.shape == (LAYERS, HEADS, LAYERS, HEADS)
    torch.testing.assert_close(alike, alike.permute(2, 3, 0, 1))
    itself = alike.flatten(0, 1).flatten(1)
    torch.testing.assert_close(itself.diagonal(), torch.ones(LAYERS * HEADS))
    assert float(itself.max()) < 1.0001
    found = sharing.matched(alike, 2, 2)
    assert found.shape == (3, LAYERS, HEADS, 2)
    assert torch.equal(found[0], torch.arange(HEADS)[:, None].expand(LAYERS, HEADS, 2))
    for lag, layer in ((1, 1), (1, 4), (2, 3)):
        for head in range(HEADS):
            scores = alike[layer, head, layer - lag].tolist()
            assert found[lag, layer, head].tolist() == sorted(range(HEADS), key=lambda h: -scores[h])[:2]


def test_costs_without_lag_are_those_of_the_layers_own_choice(model, ids, costs):
    own = measure_head_costs(model, ids, [rule(budget) for budget in BUDGETS], block_size=BLOCK)
    torch.testing.assert_close(torch.stack([each.loss for each in own], 1), costs.loss[0, ..., 0])
    assert torch.equal(costs.loss[0, ..., 0], costs.loss[0, ..., -1])
    torch.testing.assert_close(torch.stack([each.density for each in own], 1), costs.density)
    assert bool(costs.loss[1, 1:-1, 1:].mean() > costs.loss[0, 1:-1, 1:].mean())  # others' blocks lose more
    assert bool(costs.loss[2, :-1, :2].isinf().all())
    assert not bool(costs.loss[:, -1].any())


def test_layers_that_choose_are_the_best_ones_of_all():
    table = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    table[0] = 0
    for lag in range(1, 4):
        table[lag, :lag] = torch.inf

    def cost(choosing):
        lags = [layer - source for layer, source in enumerate(sharing.sources_of(choosing, 7))]
        return sum(float(table[lag, layer]) if lag < 4 else torch.inf for layer, lag in enumerate(lags))

    for count in (2, 3, 5, 7):
        best = min(cost([0, *some]) for some in combinations(range(1, 7), count - 1))
        found = sharing.choosing_layers(table, count)
        assert len(found) == count
        assert cost(found) == pytest.approx(best)
    with pytest.raises(ValueError, match="within a reach of 3"):
        sharing.choosing_layers(table, 1)


def test_heads_with_one_list_have_one_budget(costs):
    lists = sharing.shared_lists(costs, 3, 0.8)
    density, budgets, loss = lists.at(0.8)
    assert 0.65 < density <= 0.8
    assert len(lists.choosing) == 3
    assert loss >= 0
    for each in lists.shared():
        assert budgets[each.layer] == [budgets[each.source][head] for head in each.heads]
    _, everything, nothing = lists.at(1.0)
    assert torch.tensor(everything).eq(1.0).all()
    assert nothing == pytest.approx(0)
    alone = sharing.shared_lists(costs, LAYERS, 0.8)
    assert alone.shared() == ()
    assert alone.least_density == pytest.approx(float(costs.density[0].mean()))


def test_a_head_reads_the_list_that_suits_its_budget():
    """One head needs many blocks and one few. Each reads the list of the head with such a need, whatever is alike."""
    grid = torch.tensor(BUDGETS, dtype=torch.float64)
    loss = torch.zeros(2, len(BUDGETS), 2, 2, 2, dtype=torch.float64)
    loss[:, :, :, 0], loss[:, :, :, 1] = (10 * (1 - grid) ** 2)[:, None, None], (0.01 * (1 - grid) ** 2)[:, None, None]
    loss[1, :, 0] = torch.inf
    matches = torch.tensor([[[[0, 0], [1, 1]], [[0, 0], [1, 1]]], [[[0, 0], [1, 1]], [[1, 0], [0, 1]]]])
    costs = sharing.SharedCosts((0, 1), matches, loss, grid[:, None, None].expand(-1, 2, 2))
    lists = sharing.SharedLists(costs, [0, 0], 0.4)
    (shared,) = lists.shared()
    assert shared.heads == (0, 1)
    density, budgets, _ = lists.at(0.4)
    assert density <= 0.4
    assert budgets[0] == budgets[1]
    assert budgets[0][0] > budgets[0][1]


def test_the_policy_visits_as_many_blocks_as_predicted(model, ids, costs):
    lists = sharing.shared_lists(costs, 2, 0.8)
    density, budgets, _ = lists.at(0.8)
    rules = [dx.Rule.of(rule(tuple(row)), layers=[layer]) for layer, row in enumerate(budgets)]
    policy = Policy(model=model_facts(model), block_size=BLOCK, rules=tuple(rules), shared=lists.shared())
    seen = []
    watch = lambda _, layout: seen.append(layout.density())
    with dx.apply(model, policy) as handle, handle.watch(watch), torch.no_grad():
        model(ids[:, :-1])
    assert len(resolve(policy)) == len(seen) == LAYERS
    assert sum(seen) / LAYERS == pytest.approx(density, abs=0.005)
