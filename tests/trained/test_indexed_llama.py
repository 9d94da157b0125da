# SPDX-License-Identifier: Apache-2.0
"""A Llama converted to tokens that an indexer selects: equal to dense at first; saved, decoded and trained."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import dynaxx as dx
from dynaxx import UnsupportedInputError
from dynaxx.cli import app
from dynaxx.trained.transformers.indexed_llama import IndexedLlamaForCausalLM, convert_to_indexed
from dynaxx.trained.transformers.nsa_llama import convert_to_nsa
from example_scripts import import_example
from tiny import TEXT, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dense(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ids(folder):
    return AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]


def convert(model, count=24):
    return convert_to_indexed(model, dx.trained.TopKTokens(count), index_heads=2, index_dim=16)


@torch.no_grad()
def test_few_tokens_are_the_dense_model(dense, ids):
    made = convert(dense, 64)
    torch.testing.assert_close(made(ids[:, :64]).logits, dense(ids[:, :64]).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(convert(dense, 4)(ids[:, :64]).logits, dense(ids[:, :64]).logits, atol=1e-2)
    assert not isinstance(dense, IndexedLlamaForCausalLM)


@torch.no_grad()
def test_save_and_load(dense, ids, tmp_path):
    made = convert(dense)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, IndexedLlamaForCausalLM)
    assert torch.equal(made(ids[:, :100]).logits, loaded(ids[:, :100]).logits)


@torch.no_grad()
def test_decoding_gives_what_a_prompt_gives(dense, ids):
    made, ids = convert(dense), ids[:, :90].repeat(2, 1)
    want = made(ids).logits
    first = made(ids[:, :84], use_cache=True)
    cache, rows = first.past_key_values, [first.logits]
    rows += [made(ids[:, t : t + 1], past_key_values=cache).logits for t in range(84, 90)]
    torch.testing.assert_close(torch.cat(rows, 1), want, atol=1e-4, rtol=1e-4)
    tokens = made.generate(ids[:1, :40], max_new_tokens=8, do_sample=False)
    assert tokens.shape[1] <= 48
    with pytest.raises(ValueError, match="did not put there"):
        made(ids[:1, :1], past_key_values=dense(ids[:1, :9], use_cache=True).past_key_values)
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="was reordered or cut"):
        made(ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="does not support padding"):
        made(ids, attention_mask=torch.ones_like(ids).index_fill_(1, torch.tensor([0]), 0))


def test_both_stages_learn(dense, ids):
    made = convert(dense).train()
    optimizer = torch.optim.AdamW(made.parameters(), lr=2e-3)
    seen = []
    for stage in (True, False):
        made.set_dense(stage)
        for _ in range(4):
            optimizer.zero_grad()
            result = made(ids[:, :128], labels=ids[:, :128])
            result.loss.backward()
            seen.append(float(made.index_loss()[0].detach()))
            optimizer.step()
    assert seen[3] < seen[0]
    assert all(p.grad is not None for p in made.parameters())
    getattr(made, "activation_checkpointing_enable", made.gradient_checkpointing_enable)()  # its newer name
    made(ids[:, :64], labels=ids[:, :64]).loss.backward()


def test_only_dense_llamas_are_converted(dense):
    for model in (convert(dense), GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32))):
        for conversion in (convert_to_indexed, convert_to_nsa):
            with pytest.raises(UnsupportedInputError, match="only LlamaForCausalLM"):
                conversion(model)
    with pytest.raises(ValueError, match="`index_precision` must be"):
        convert_to_indexed(dense, precision="fp4")


def test_command(folder, tmp_path):
    run = lambda *more: CliRunner().invoke(app, ["convert", str(folder), "--to", "indexed", "--quiet", "--json", *more])
    done = run("--out", str(tmp_path / "made"), "--tokens", "64", "--index-heads", "2", "--index-dim", "16")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert made.config.index_tokens == 64
    assert said["new_parameters"] == sum(p.numel() for n, p in made.named_parameters() if "indexer" in n)
    wrong = run("--out", str(tmp_path / "other"), "--window", "64")
    assert wrong.exit_code != 0
    assert "--window" in wrong.output


@pytest.fixture(scope="module")
def finetune():
    return import_example("finetune_indexed")


def test_the_example_trains_both_stages(finetune, dense, folder, tmp_path):
    """Indexers learn by themselves first, from another text without what is measured; then everything learns."""
    model = convert(dense)
    model.save_pretrained(tmp_path / "made")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "made")
    (tmp_path / "text.txt").write_text(TEXT * 3)
    (tmp_path / "learn.txt").write_text("A text to learn from, of a few words. " * 60)
    files = [
        "--text",
        str(tmp_path / "text.txt"),
        "--learn",
        str(tmp_path / "learn.txt"),
        "--out",
        str(tmp_path / "out"),
    ]
    sizes = ["--context", "96", "--tokens", "16", "--dense-steps", "3", "--steps", "2", "--needles", "1"]
    results = finetune.run(finetune.arguments([str(tmp_path / "made"), *files, *sizes, "--out", str(tmp_path / "out")]))
    assert [row["attention"] for row in results["rows"]] == ["dense", *["16 tokens"] * 3, "dense"]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    moved = {name: not torch.equal(x, model.state_dict()[name]) for name, x in trained.state_dict().items()}
    assert all(moved[f"model.layers.0.self_attn.indexer.{x}_proj.weight"] for x in ("q", "k", "weight"))
    assert moved["model.layers.0.self_attn.q_proj.weight"]


def test_the_example_leaves_out_what_it_measures(finetune):
    long, other = "word " * 30, "other words " * 20
    assert finetune.without(f"{long}\n\nshort\n\n{other}", f"short\n\n{long}") == f"short\n\n{other}"


def test_indexers_start_as_heads_of_attention(dense, ids):
    made = convert_to_indexed(dense, dx.trained.TopKTokens(64), index_heads=2, index_dim=16, sample=ids)
    for layer in made.model.layers:
        attention = layer.self_attn
        assert torch.equal(attention.indexer.k_proj.weight[:16], attention.k_proj.weight[:16])
    with torch.no_grad():
        torch.testing.assert_close(made(ids[:, :64]).logits, dense(ids[:, :64]).logits, atol=1e-4, rtol=1e-4)
    assert not any(layer.self_attn._forward_pre_hooks for layer in dense.model.layers)
    with pytest.raises(ValueError, match="`sample` must be"):
        convert_to_indexed(dense, sample=ids[0])
