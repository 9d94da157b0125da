# SPDX-License-Identifier: Apache-2.0
"""A Llama converted to native sparse attention: near dense at first; saved, decoded as in training, and trained."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from dynaxx import UnsupportedInputError
from dynaxx.cli import app
from dynaxx.trained.nsa.decode import compress_pages
from dynaxx.trained.nsa.spans import NsaSizes
from dynaxx.trained.transformers import nsa_llama
from dynaxx.trained.transformers.nsa_llama import NsaLlamaForCausalLM, convert_to_nsa
from example_scripts import import_example
from tiny import TEXT, save_tiny_model

SIZES = NsaSizes(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, first_blocks=1, local_blocks=1, window=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dense(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ids(folder):
    return AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]


@pytest.mark.parametrize("compression", ["mean", "weighted", "mlp"])
def test_it_begins_near_dense(dense, ids, compression):
    model = convert_to_nsa(dense, SIZES, compression=compression, gate_init=(0.001, 0.998, 0.001))
    with torch.no_grad():
        want, got = (each(ids[:, :48]).logits for each in (dense, model))  # 48 tokens: three blocks are all
        assert (got - want).norm() / want.norm() < 0.02
        assert model(ids[:, :200]).logits.isfinite().all()
    assert not isinstance(dense, NsaLlamaForCausalLM)


def test_save_and_load(dense, ids, tmp_path):
    model = convert_to_nsa(dense, SIZES, compression="mlp")
    for name, parameter in model.named_parameters():
        if "gate" in name or "compress" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, NsaLlamaForCausalLM)
    assert AutoConfig.from_pretrained(tmp_path).sizes == SIZES
    for (name, one), (_, other) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    with torch.no_grad():
        assert torch.equal(model(ids[:, :100]).logits, loaded(ids[:, :100]).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_of_weights_alone(folder, ids, tmp_path, dtype):
    """Rotary frequencies stay fp32, as in the dense model and in a model that is loaded again."""
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model = convert_to_nsa(dense, SIZES, compression="weighted")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    with torch.no_grad():
        assert torch.equal(model(ids[:, :100]).logits, loaded(ids[:, :100]).logits)


def test_generation_is_the_forward_token_by_token(dense, ids):
    model = convert_to_nsa(dense, SIZES)
    with torch.no_grad():
        made = model.generate(ids[:, :60], max_new_tokens=8, do_sample=False)
        logits = model(made).logits
    assert torch.equal(made[0, 60:], logits[0, 59:-1].argmax(-1))


@pytest.mark.parametrize("how", ["greedy", "beams", "assisted"])
def test_compressed_tokens_follow_the_cache(dense, ids, how, monkeypatch):
    """Beams permute the cache and assisted decoding crops it; greedy decoding compresses only new tokens."""
    model = convert_to_nsa(dense, SIZES, compression="mlp")
    for name, parameter in model.named_parameters():
        if "gate" in name or "compress" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    counts = []
    monkeypatch.setattr(
        nsa_llama, "compress_pages",
        lambda *args, **named: counts.append(named.get("new_tokens")) or compress_pages(*args, **named),
    )  # fmt: skip
    options = {"greedy": {}, "beams": {"num_beams": 3}, "assisted": {"prompt_lookup_num_tokens": 3}}[how]
    with torch.no_grad():
        made = model.generate(ids[:, :60], max_new_tokens=40, do_sample=False, **options)
        monkeypatch.setattr(nsa_llama, "NsaMemory", Forgetful)
        assert torch.equal(made, model.generate(ids[:, :60], max_new_tokens=40, do_sample=False, **options))
        if how != "beams":
            assert torch.equal(made[0, 60:], model(made).logits[0, 59:-1].argmax(-1))
    if how == "greedy":
        layers = model.config.num_hidden_layers
        assert counts[: 39 * layers] == [None] * layers + [1] * (38 * layers)


class Forgetful(nsa_llama.NsaMemory):
    """Remember nothing of earlier steps."""

    def __init__(self, *args):
        super().__init__(*args)
        self._known = None


def test_packed_sequences(dense, ids):
    model = convert_to_nsa(dense, SIZES)
    ends = torch.tensor([0, 70, 100], dtype=torch.int32)
    positions = torch.cat([torch.arange(70), torch.arange(30)])[None]
    with torch.no_grad():
        packed = model(ids[:, :100], position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends,
                        max_length_q=70, max_length_k=70).logits  # fmt: skip
        alone = [model(ids[:, :70]).logits, model(ids[:, 70:100]).logits]
    assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-5)


def test_it_trains_from_dense_to_sparse(dense, ids):
    model = convert_to_nsa(dense, SIZES).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for count in (8, 8, 6, 6, 4, 4, 3, 3, 3, 3):
        model.set_slc_count(count)
        loss = model(ids[:, :128], labels=ids[:, :128]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.config.sizes.slc_count == 3


def test_gradient_checkpointing(dense, ids):
    model = convert_to_nsa(dense, SIZES).train()
    model(ids[:, :80], labels=ids[:, :80]).loss.backward()
    want = model.model.layers[0].self_attn.gate.weight.grad.clone()
    model.zero_grad()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its newer name
    model(ids[:, :80], labels=ids[:, :80], use_cache=False).loss.backward()
    assert torch.allclose(model.model.layers[0].self_attn.gate.weight.grad, want, atol=1e-6)


def test_unserved_calls_and_models_are_refused(dense, ids):
    model = convert_to_nsa(dense, SIZES)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    with pytest.raises(ValueError, match="does not support padding"):
        model(ids[:, :40].view(2, 20), attention_mask=mask)
    with pytest.raises(ValueError, match="growing cache"):
        model.generate(ids[:, :20], max_new_tokens=2, cache_implementation="static")
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10))
    for wrong in (other, model, torch.nn.Linear(2, 2)):
        with pytest.raises(UnsupportedInputError, match="only LlamaForCausalLM"):
            convert_to_nsa(wrong)
    with pytest.raises(ValueError, match="compression"):
        convert_to_nsa(dense, compression="max")
    with pytest.raises(ValueError, match="gate_init"):
        convert_to_nsa(dense, gate_init=(0.0, 1.0, 0.0))


def test_the_command(folder, tmp_path):
    out = tmp_path / "nsa"
    done = CliRunner().invoke(
        app, ["convert", str(folder), "--out", str(out), "--slc-count=4", "--slc-block=16", "--json"]
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["sizes"]["slc_count"] == 4
    assert AutoModelForCausalLM.from_pretrained(out).config.sizes.slc_block == 16


def test_the_command_refuses_a_gate_of_no_share(folder, tmp_path):
    done = CliRunner().invoke(app, ["convert", str(folder), "--out", str(tmp_path / "x"), "--dense-gate", "1.5"])
    assert done.exit_code != 0
    assert "--dense-gate must be between 0 and 1, got 1.5" in done.stderr


def test_the_command_overwrites_nothing(folder, tmp_path):
    """The command refuses the folder of another model and of the dense model, and accepts an empty folder."""
    shutil.copytree(folder, tmp_path / "dense")
    (tmp_path / "file").touch()
    for name in ("dense", "file"):
        done = CliRunner().invoke(app, ["convert", str(tmp_path / "dense"), "--out", str(tmp_path / name)])
        assert done.exit_code == 2
        assert "already exists: remove it, or choose another folder" in done.stderr
    assert AutoConfig.from_pretrained(tmp_path / "dense").model_type == "llama"
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["convert", str(folder), "--out", str(tmp_path / "empty"), "--quiet"])
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@pytest.mark.parametrize("error", [SafetensorError("No space left on device (os error 28)"), KeyboardInterrupt()])
def test_a_conversion_that_stops_leaves_nothing(folder, tmp_path, monkeypatch, error):
    def save(self, path):
        (Path(path) / "model.safetensors").write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(NsaLlamaForCausalLM, "save_pretrained", save)
    done = CliRunner().invoke(app, ["convert", str(folder), "--out", str(tmp_path / "nsa")])
    if isinstance(error, SafetensorError):
        assert done.exit_code == 2
        assert f"no space left to write {tmp_path / 'nsa'}; free some" in done.stderr
    assert done.exit_code != 0
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_cut_off_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1000)
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "cut"), "--out", str(tmp_path / "nsa")])
    assert done.exit_code == 2
    assert "cut is not a causal language model that transformers can read" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


@pytest.fixture(scope="module")
def finetune():
    return import_example("finetune_nsa")


@pytest.fixture
def given(folder, dense, tmp_path):
    """Return arguments of the example for a tiny converted model."""
    convert_to_nsa(dense, SIZES).save_pretrained(tmp_path / "nsa")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "nsa")
    (tmp_path / "text.txt").write_text(TEXT)
    fixed = ["--text", str(tmp_path / "text.txt"), "--context", "128", "--steps", "6", "--eval-every", "3"]
    return [str(tmp_path / "nsa"), *fixed, "--lr", "1e-3"]


def test_the_example_recovers(finetune, given, tmp_path):
    """The example reduces the blocks from all to the model's number on a tiny model, and writes the result that it
    prints.
    """
    results = finetune.run(finetune.arguments([*given, "--out", str(tmp_path / "out")]))
    assert [row["slc_count"] for row in results["curve"]] == [8, 4, 3]
    assert results["final"] < results["converted"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.sizes == SIZES


def test_the_example_goes_on_after_it_was_killed(finetune, given, tmp_path, monkeypatch):
    whole = finetune.run(finetune.arguments([*given, "--out", str(tmp_path / "whole")]))
    again, save = [*given, "--save-every", "0", "--out", str(tmp_path / "again")], finetune.save

    def save_and_die(path, state):
        save(path, state)
        if state["step"] == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        finetune.run(finetune.arguments(again))
    monkeypatch.setattr(finetune, "save", save)
    torch.manual_seed(1)
    assert finetune.run(finetune.arguments(again)) == whole


def test_the_example_keeps_what_it_trained_where_the_model_cannot_be_saved(finetune, given, tmp_path, monkeypatch):
    command, save = [*given, "--out", str(tmp_path / "out")], finetune.save_model

    def full(loaded, folder):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(finetune, "save_model", full)
    with pytest.raises(SystemExit, match=r"No space left on device: .*out'; run this again when there is room"):
        finetune.run(finetune.arguments(command))
    monkeypatch.setattr(finetune, "save_model", save)
    monkeypatch.setattr(finetune, "loss_of", losses := mock.Mock(return_value=1.0))
    assert finetune.run(finetune.arguments(command))["steps"] == 6
    assert losses.call_count == 1  # at the end: nothing is trained again
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.sizes == SIZES


def test_the_example_stops_at_what_is_not_finite(finetune, given, tmp_path):
    with pytest.raises(SystemExit, match=r"gradients of step \d+: nan"):
        finetune.run(finetune.arguments([*given, "--lr", "1e30", "--out", str(tmp_path / "out")]))


def test_the_example_wants_a_converted_model(finetune, tmp_path, capsys):
    with pytest.raises(SystemExit):
        finetune.arguments([str(tmp_path), "--out", "x"])
    assert "dynaxx convert" in capsys.readouterr().err
