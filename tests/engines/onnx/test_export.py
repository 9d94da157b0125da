# SPDX-License-Identifier: Apache-2.0
"""Exported graphs compute in ONNX Runtime what torch computes; impossible exports are refused at once."""

import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import dynaxx as dx
from dynaxx.engines.onnx import OnnxModel, export_onnx
from dynaxx.engines.onnx import export as export_module
from dynaxx.engines.onnx.export import export_model, int8_blocks
from dynaxx.engines.onnx.operators import _trace_attention
from dynaxx.engines.portable.attention import attend_by_rules, bias_of
from dynaxx.engines.portable.plans import Heads, PortableRules
from dynaxx.engines.portable.rules import GatherRule
from dynaxx.integrations.transformers import model_facts
from dynaxx.policy import Policy, Rule
from tiny import llama, tokens

slow = pytest.mark.slow  # exporting a model takes ten seconds

WINDOW = dx.SlidingWindow(100) | dx.Sink(5)


def policy_of(model, **fields):
    return Policy(model=model_facts(model), rules=[Rule.of(WINDOW)], **fields)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = llama()
    folder = tmp_path_factory.mktemp("onnx") / "tiny"
    return model, policy_of(model, dense_below=64), export_onnx(model, folder, policy_of(model, dense_below=64))


@slow
@torch.no_grad()
def test_the_portable_form_equals_torch_at_any_length(exported):
    model, policy, made = exported
    ran = OnnxModel(made.folder, threads=1)
    for shape in ((2, 333), (1, 64), (1, 63), (3, 1)):
        ids = tokens(*shape)
        with dx.apply(model, policy):
            want = model(ids).logits[:, -1:].numpy()
        logits, cache = ran.step(ids.numpy())
        np.testing.assert_allclose(logits, want, atol=1e-4)
        assert len(cache) == 4
        assert cache[0].shape == (shape[0], 2, shape[1], 16)


@slow
@torch.no_grad()
def test_it_generates_the_tokens_of_torch(exported):
    model, policy, made = exported
    ids = tokens(2, 200)
    with dx.apply(model, policy):
        mask = torch.ones_like(ids)
        want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)[:, 200:]
    found = np.stack(list(OnnxModel(made.folder).generate(ids.numpy(), 12)), 1)
    np.testing.assert_array_equal(found[:, : want.shape[1]], want.numpy())


@slow
def test_prompts_of_unequal_lengths_generate_what_each_does_alone(exported):
    running = OnnxModel(exported[2].folder)
    ids, mask = tokens(3, 150).numpy(), np.ones((3, 150), np.int64)
    mask[0, :70] = mask[2, :70] = mask[1, 149:] = 0
    with mock.patch.object(running, "step", wraps=running.step) as step:
        found = np.stack(list(running.generate(ids, 6, attention_mask=mask)), 1)
    assert step.call_count == 2 * 6
    for row, shown, each in zip(ids, mask, found, strict=True):
        np.testing.assert_array_equal(each, np.ravel(list(running.generate(row[None, shown > 0], 6))))
    with pytest.raises(ValueError, match="show a token of each prompt"):
        next(running.generate(ids, 6, attention_mask=0 * mask))


@slow
def test_the_files_say_what_they_are(exported):
    _, policy, made = exported
    assert made.form == "portable"
    graph = onnx.load(made.folder / "prefill.onnx", load_external_data=False)
    assert {(each.domain, each.version) for each in graph.opset_import} == {("", made.opset)}
    assert graph.graph.input[0].type.tensor_type.shape.dim[1].dim_param == "seqlen"
    assert json.loads((made.folder / "dynaxx.json").read_text())["sparse_from"] == 64
    assert dx.load_policy(made.folder / "policy.json") == policy
    weights = sum(each.numel() * 4 for each in exported[0].parameters())
    assert (made.folder / "weights.bin").stat().st_size < 1.5 * weights + 4096 * 40  # once for both graphs


def test_weights_are_rounded_to_eight_bits_in_blocks():
    weight = np.random.default_rng(0).standard_normal((45, 7)).astype(np.float32)  # (inputs, outputs)
    weight[:32, 3] = 0
    values, scales = int8_blocks(weight)
    assert values.shape == (7, 2, 32)
    found = ((values.astype(np.float32) - 128) * scales[..., None]).reshape(7, 64)[:, :45].T
    assert (abs(found - weight) <= 0.5001 * scales.repeat(32, 1)[:, :45].T).all()


@slow
@pytest.mark.parametrize("form", ["portable", "custom"])
@torch.no_grad()
def test_weights_of_eight_bits_compute_nearly_the_same(form, tmp_path):
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight  # as models with tied embeddings have it
    made = export_onnx(model, tmp_path / "out", policy_of(model), form=form, weights="int8", all_logits=True)
    graph = onnx.load(made.folder / f"{made.graphs[0]}.onnx", load_external_data=False)
    assert [node.op_type for node in graph.graph.node].count("MatMulNBits") == 15  # 7 in each layer, and the last
    ids = tokens(2, 200)
    with dx.apply(model, policy_of(model)):
        want = model(ids).logits.numpy()
    ran = OnnxModel(made.folder, threads=1)
    logits, cache = ran.step(ids.numpy()[:, :150])
    rest, _ = ran.step(ids.numpy()[:, 150:], cache)
    error = np.linalg.norm(np.concatenate((logits, rest), 1) - want) / np.linalg.norm(want)
    assert 1e-5 < error < 0.1, "sharp random attention amplifies rounding; a wrong scale or order gives more than 1"


@slow
@torch.no_grad()
def test_linear_layers_with_a_bias_have_weights_of_eight_bits_too(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=48, n_layer=1, n_head=4, n_positions=256)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    made = export_onnx(model, tmp_path / "out", weights="int8")
    nodes = [node.op_type for node in onnx.load(made.folder / "decode.onnx", load_external_data=False).graph.node]
    assert (nodes.count("MatMulNBits"), nodes.count("Gemm")) == (5, 0)  # 4 in the layer, and the last
    ids = tokens(2, 40)
    logits, _ = OnnxModel(made.folder, threads=1).step(ids.numpy())
    want = model(ids).logits[:, -1:].numpy()
    assert 1e-5 < np.linalg.norm(logits - want) / np.linalg.norm(want) < 0.05


@slow
def test_nothing_is_overwritten_and_nothing_half_written(exported, tmp_path, monkeypatch):
    model, policy, made = exported
    with pytest.raises(ValueError, match="already exists"):
        export_onnx(model, made.folder, policy)
    with pytest.raises(ValueError, match="eval mode"):
        export_onnx(llama().train(), tmp_path / "a", policy)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_module, "_graphs", lambda *args: ("portable", {}))
    monkeypatch.setattr(export_module, "save_graphs", full)
    with pytest.raises(OSError, match="no space left to write"):
        export_onnx(model, tmp_path / "b" / "c", policy)
    assert not [*tmp_path.rglob("*.tmp")]
    assert not (tmp_path / "b" / "c").exists()


def test_folders_that_are_no_export_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="dynaxx export"):
        OnnxModel(tmp_path)
    (tmp_path / "dynaxx.json").write_text('{"format": "dynaxx.onnx", "version": 99}')
    with pytest.raises(ValueError, match="newer dynaxx"):
        OnnxModel(tmp_path)


@pytest.mark.slow
@torch.no_grad()
def test_attention_of_one_layer_runs_in_onnx_runtime():
    torch.manual_seed(0)
    rules = PortableRules((Heads((0, 1, 2, 3), GatherRule.of(WINDOW, (64, 64), causal=True)),))
    node = [SimpleNamespace(shape=(None, heads, None, 16)) for heads in (4, 2, 2)]
    graph = _trace_attention(rules, [rules.parts[0].rule], 0.25, node, causal=True)
    session = onnxruntime.InferenceSession(onnx_ir.to_proto(graph).SerializeToString())
    for batch, seqlen_q, seqlen_k in ((1, 300, 300), (2, 65, 200), (1, 1, 1)):
        q, k, v = (torch.randn(batch, heads, n, 16) for heads, n in ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k)))
        bias = bias_of(rules.parts[0].rule, seqlen_q, seqlen_k, torch.float32, causal=True)
        given = {"q": q, "k": k, "v": v, "bias0": bias}
        (found,) = session.run(None, {name: value.numpy() for name, value in given.items()})
        want = attend_by_rules(rules, q, k, v, 0.25, None, causal=True, known={})
        np.testing.assert_allclose(found, want.numpy(), atol=1e-5)


@slow
def test_the_guide_runs_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[3] / "docs" / "guides" / "onnx.md"
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
    assert (names["exported"].form, names["exported"].opset) == ("portable", 20)
    assert len(names["tokens"]) == 5


def test_options_of_the_command_are_checked_before_the_work(tmp_path):
    for options, reason in (
        ({"shape": "1"}, "shape is not one of form, logits, weights, window"),
        ({"form": "fast"}, "auto, portable or custom"),
        ({"logits": "some"}, "last or all"),
        ({"weights": "int4"}, "fp32 or int8"),
        ({"window": "1,2,3"}, "W or LEFT,RIGHT"),
    ):
        with pytest.raises(ValueError, match=reason):
            export_model(tmp_path, None, tmp_path / "out", options)


@slow
@torch.no_grad()
def test_the_command_exports_a_decoder_and_an_encoder(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 6}
    bert = BertModel(BertConfig(**sizes, vocab_size=64), add_pooling_layer=False).eval()
    bert.save_pretrained(tmp_path / "bert")
    made = export_model(tmp_path / "bert", None, tmp_path / "out", {"window": "20,30"})
    assert made.graphs == ("model",)
    assert (made.folder / "config.json").exists()
    ids = tokens(2, 200)
    mask = torch.ones_like(ids)
    mask[1, 150:] = 0
    found = OnnxModel(made.folder).encode(ids.numpy(), mask.numpy())
    with dx.apply(bert, window=(20, 30)):
        want = bert(ids, attention_mask=mask)[0]
    np.testing.assert_allclose(found[mask.bool().numpy()], want[mask.bool()].numpy(), atol=1e-4)
