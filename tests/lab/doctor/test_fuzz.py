# SPDX-License-Identifier: Apache-2.0
"""The fuzzer finds a wrong backend, and the command that it prints repeats the case."""

import pytest
import torch
from typer.testing import CliRunner

import dynaxx as dx
from dynaxx.cli import app
from dynaxx.kernels.attention import cpu
from dynaxx.lab.doctor.fuzz import fuzz
from dynaxx.patterns.base import Combined
from dynaxx.selection import Scorer
from dynaxx.settings import registered
from dynaxx.testing import drawing, random_problem
from dynaxx.testing.drawing import MEMORY, Draw
from isas import FASTEST


def test_random_problems_agree_and_are_counted():
    found = fuzz(None, seed=100, cases=40, isas=["torch", FASTEST])
    assert found.ok, found.summary()
    assert found.checked["reference"] == found.cases == 40
    assert found.checked["cpu torch"] > 20
    assert set(found.covered["call"]) == {"batch", "packed", "merged", "buckets"}
    assert {"no queries or no keys", "several lengths", "more queries than keys"} <= set(found.covered["lengths"])
    assert set(found.covered["memory"]) == set(MEMORY)
    assert found.to_dict()["next_seed"] == 140
    assert "continue with --seed 140" in found.summary()


def test_every_pattern_selector_and_scorer_is_drawn():
    kinds = {}
    for seed in range(400):
        draw = Draw.of(seed, torch.device("cpu"))
        draw.pattern(50)
        draw.rule(50, from_data=True)
        for kind, names in draw.traits.items():
            kinds.setdefault(kind, set()).update(names)
    ours = lambda cls: {rule.__name__ for rule in registered(cls) if not issubclass(rule, Combined)}
    alone = {rule.__name__ for rule in registered(dx.Pattern) if rule.stands_alone and not issubclass(rule, Combined)}
    assert kinds["pattern"] == alone - {"GlobalContent"}  # which stands for `GlobalTokens` once resolved
    assert kinds["selector"] == ours(dx.Selector) | {"Hybrid"}
    assert kinds["scorer"] == ours(Scorer)
    assert kinds["dtype"] == {"float16", "bfloat16", "float32", "float64"}


@pytest.mark.parametrize("name", MEMORY)
def test_moved_tensors_are_the_same_numbers(name):
    for shape in ((2, 5, 3, 4), (1, 1, 1, 1), (2, 0, 3, 4)):
        x = torch.randn(shape)
        assert torch.equal(MEMORY[name](x), x)
    assert name in ("contiguous", "odd address") or not MEMORY[name](torch.randn(2, 5, 3, 4)).is_contiguous()


def test_a_problem_is_its_seed():
    for seed in range(20):
        one, other = random_problem(seed), random_problem(seed)
        assert one.label == other.label
        assert all(torch.equal(a, b) for a, b in zip(one.inputs.values(), other.inputs.values(), strict=True))


def test_a_layout_that_shows_another_pair_is_found(monkeypatch):
    right = drawing.Draw._definition
    monkeypatch.setattr(drawing.Draw, "_definition", lambda *args: ~right(*args))
    assert any("shows other pairs than its rule" in each.what for each in fuzz(None, cases=5).mismatches)


def test_an_unknown_build_is_refused():
    with pytest.raises(ValueError, match="`isas` must be among"):
        fuzz(1, isas=["z80"])


def test_a_wrong_backend_is_found_and_named(monkeypatch):
    right = cpu.attention_forward

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        return out + 0.1, lse

    monkeypatch.setattr(cpu, "attention_forward", wrong)
    found = fuzz(0, seed=3)
    assert not found.ok
    assert {each.backend for each in found.mismatches} == {"cpu"}
    assert found.mismatches[0].reproduce.startswith("dynaxx doctor --fuzz-seed 3")
    result = CliRunner().invoke(app, ["doctor", "--fuzz-seed", "3", "--quiet"])
    assert result.exit_code == 1
    assert "--fuzz-seed 3" in result.output


def test_command_line():
    result = CliRunner().invoke(app, ["doctor", "--fuzz", "0.2", "--seed", "7", "--quiet", "--json"])
    assert result.exit_code == 0, result.output
    assert '"mismatches": []' in result.output
