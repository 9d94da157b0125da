"""The fuzzer: it checks, it finds a wrong backend, and its line shows the case again."""

from typer.testing import CliRunner

from dynaxx.cli import app
from dynaxx.kernels import cpu
from dynaxx.lab.fuzz import fuzz


def test_random_problems_agree():
    found = fuzz(5, seed=100, cases=8)
    assert found.ok, found.summary()
    assert found.checked["reference"] == found.cases == 8


def test_a_wrong_backend_is_found_and_named(monkeypatch):
    right = cpu.attention_forward

    def wrong(*args):
        out, lse = right(*args)
        return out + 0.1, lse

    monkeypatch.setattr(cpu, "attention_forward", wrong)
    found = fuzz(0, seed=3)
    assert not found.ok
    assert {each.backend for each in found.mismatches} == {"cpu"}
    assert found.mismatches[0].reproduce().startswith("dynaxx doctor --fuzz-seed 3")
    result = CliRunner().invoke(app, ["doctor", "--fuzz-seed", "3", "--quiet"])
    assert result.exit_code == 1
    assert "--fuzz-seed 3" in result.output


def test_command_line():
    result = CliRunner().invoke(app, ["doctor", "--fuzz", "0.2", "--seed", "7", "--quiet", "--json"])
    assert result.exit_code == 0, result.output
    assert '"mismatches": []' in result.output
