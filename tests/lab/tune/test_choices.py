# SPDX-License-Identifier: Apache-2.0
"""benchmarks/quality/choices emulates the library: the same blocks, the same losses, the same costs."""

from dataclasses import replace

import pytest
import torch
from benchmarks.quality.choices import gates, masked, trials, ways
from benchmarks.quality.choices.__main__ import STUDIES

import dynaxx as dx
from dynaxx.lab.perplexity import token_losses
from dynaxx.lab.tune.sensitivity import measure_head_costs
from tiny import save_tiny_model

TOKENS, BLOCK = 512, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("transformers")
    from dynaxx.lab.models import load_model

    model = load_model(str(save_tiny_model(tmp_path_factory.mktemp("tiny"))), device="cpu").model
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)  # flat attention would leave blocks whose order rounding decides
    return model


@pytest.fixture
def ids():
    return torch.randint(3, 300, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))


FORCED = dx.Sink(BLOCK) | dx.LocalBlocks(2) | dx.LastQueries(64)
RULES = {
    "share": (lambda budget: FORCED | dx.TopK(budget, dx.MeanQuery(), TOKENS // BLOCK // 2, per="head"), 0.2),
    "top_p": (lambda budget: FORCED | dx.TopP(budget, dx.MeanQuery(), per="head"), 0.7),
}


@pytest.mark.parametrize("rule", RULES)
def test_emulated_choices_are_those_of_the_library(model, ids, rule):
    from dynaxx.integrations.transformers.apply_policy import model_facts

    make, amount = RULES[rule]
    choice = replace(ways.MEAN, rule=rule, local=32)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    found, density = trials.losses_of(model, ids, trials.Plan((choice,), torch.full((1, layers, heads), amount)))
    policy = dx.Policy(model=model_facts(model), block_size=BLOCK, rules=(dx.Rule.of(make(amount)),))
    seen = []
    with dx.apply(model, policy) as handle, handle.watch(lambda _, layout: seen.append(layout.density())):
        expected = token_losses(model, ids)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert float(density.mean()) == pytest.approx(sum(seen) / len(seen), abs=1e-5)
    assert float(density.mean()) < 0.9


@pytest.mark.parametrize(
    ("name", "scorer"),
    [("anti 16", dx.AntiDiagonal(16)), ("anti 8", dx.AntiDiagonal(8)), ("probe 64", dx.LastQueryProbe(64))],
)
def test_emulated_scorers_are_those_of_the_library(model, ids, name, scorer):
    from dynaxx.integrations.transformers.apply_policy import model_facts

    choice = replace(ways.MEAN, scorer=name, local=32)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    found, density = trials.losses_of(model, ids, trials.Plan((choice,), torch.full((1, layers, heads), 0.2)))
    rule = FORCED | dx.TopK(0.2, scorer, TOKENS // BLOCK // 2, per="head")
    policy = dx.Policy(model=model_facts(model), block_size=BLOCK, rules=(dx.Rule.of(rule),))
    with dx.apply(model, policy):
        expected = token_losses(model, ids)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert float(density.mean()) < 0.9


def test_emulated_costs_are_those_of_the_library(model, ids):
    choice = replace(ways.MEAN, local=32)
    loss, density = trials.costs_of(model, ids, [choice])[choice]
    candidates = [RULES["share"][0](amount) for amount in ways.GRIDS["share"]]
    expected = measure_head_costs(model, ids, candidates, block_size=BLOCK)
    for each in expected:
        torch.testing.assert_close(loss[:, each.layer], each.loss, atol=1e-9, rtol=1e-3)
        torch.testing.assert_close(density[:, each.layer], each.density, atol=1e-5, rtol=1e-5)


def test_a_negative_amount_leaves_a_head_to_the_other_choice():
    q, k, v = torch.randn(4, 128, 16), torch.randn(2, 128, 16), torch.randn(2, 128, 16)
    p = masked.probabilities(q, k, 0.25)
    choice = replace(ways.MEAN, last=0)
    values = ways.ranked(choice, ways.OwnMasses().of(0, choice, q, k, p, 0.25), k, v)
    kept = ways.kept_blocks(choice, values, torch.tensor([-1.0, 0.0, 0.5, 1.0]), 128)
    counts = kept.sum((1, 2)).tolist()
    assert counts[0] == 0
    assert counts[1] <= counts[2] <= counts[3] == 10
    dense = masked.attend(masked.Dense(q, k, masked.with_ones(v), p, 0.25), None, choice)
    torch.testing.assert_close(dense, p @ v.repeat_interleave(2, 0))


@pytest.mark.parametrize("study", STUDIES)
def test_every_choice_keeps_everything_at_its_largest_amount(study):
    q, k, v = torch.randn(4, 128, 16), torch.randn(2, 128, 16), torch.randn(2, 128, 16)
    p = masked.probabilities(q, k, 0.25)
    for name, several in STUDIES[study].items():
        for choice in several:
            values = ways.ranked(choice, ways.OwnMasses().of(0, choice, q, k, p, 0.25), k, v)
            everything = torch.full((4,), max(ways.GRIDS[choice.rule]))
            visible = ways.grid_of(choice, 128, q.device)[0]
            assert torch.equal(ways.kept_blocks(choice, values, everything, 128), visible.expand(4, -1, -1)), name


@pytest.mark.parametrize("omitted", ["means", "query", "query share", "row"])
def test_what_stands_in_is_exact_where_a_block_is_alike(omitted):
    """Blocks of equal keys and values are their means, and rows of equal queries are their mean query."""
    alike = lambda heads: torch.randn(heads, 4, 1, 16).expand(-1, -1, 32, -1).reshape(heads, 128, 16).contiguous()
    q, k, v = alike(4), alike(2), alike(2)
    choice = replace(ways.MEAN, omitted=omitted, local=0, last=0)
    p = masked.probabilities(q, k, 0.25)
    dense = masked.Dense(q, k, masked.with_ones(v), p, 0.25)
    values = ways.ranked(choice, ways.OwnMasses().of(0, choice, q, k, p, 0.25), k, v)
    blocks = ways.kept_blocks(choice, values, torch.zeros(4), 128)
    exact = masked.attend(dense, None, choice)
    rows = slice(96, 112) if omitted == "row" else slice(96, 128) if omitted == "means" else slice(127, 128)
    assert float((masked.attend(dense, blocks, replace(choice, omitted="")) - exact)[:, rows].abs().max()) > 0.01
    if omitted == "means" or omitted == "query":
        torch.testing.assert_close(masked.attend(dense, blocks, choice)[:, rows], exact[:, rows])
    else:  # the shares of another query, which sees more or fewer keys of its own block
        torch.testing.assert_close(
            masked.attend(dense, blocks, choice)[:, 112 if omitted == "row" else 127],
            exact[:, 112 if omitted == "row" else 127],
        )


def test_dense_layers_see_everything():
    grid = len(ways.GRIDS["share"])
    density = torch.linspace(0.1, 1, grid).double()[:, None, None].expand(-1, 3, 4)
    costs = {ways.MEAN: ((1 - density) ** 2, density)}
    amounts = trials.allocation((replace(ways.MEAN, dense_layers=(0, -1)),), costs, 0.8, 2)
    assert amounts[0, 0].tolist() == amounts[0, 2].tolist() == [1.0] * 4
    assert float(amounts[0, 1].max()) < 1.0


def test_a_gate_learns_the_mass_of_other_queries(model, ids):
    found = gates.examples(model, ids, ways.MEAN)
    before = torch.eye(found[0].shape[-1]).expand(*found[0].shape[:2], -1, -1)
    visible, forced, count = ways.grid_of(ways.MEAN, TOKENS, found[0].device)
    ends = (torch.arange(len(count)) + 1) * ways.MEAN.q_block
    loss = gates.entropy(before, found, ways.MEAN, ends, visible & ~forced)
    learned, first, last = gates.distilled([found], ways.MEAN, TOKENS, 40, 0.01)
    assert first == pytest.approx(float(loss.mean()))
    assert last < first
    assert learned.shape == before.shape
