# SPDX-License-Identifier: Apache-2.0
"""The operator in Python gives what its library and torch give. `make test-onnx` has onnxruntime-extensions."""

import pytest
import torch

pytest.importorskip("onnxruntime_extensions", reason="pip install onnxruntime-extensions: make test-onnx")

import numpy as np
import onnx
from transformers import BertConfig, BertModel

import dynaxx as dx
from dynaxx.engines.onnx import OnnxModel, export_onnx, session
from dynaxx.engines.onnx.python_operator import PythonOperatorError, renamed
from dynaxx.integrations.transformers import model_facts
from dynaxx.policy import Policy, Rule
from tiny import llama, tokens

pytestmark = pytest.mark.slow  # an export takes seconds

RULES = {
    "a selection": [Rule.of(dx.Sink(4) | dx.LocalBlocks(1) | dx.TopK(0.3))],
    "budgets by head": [Rule.of(dx.TopK((0.1, 0.9, 0.4, 0.2, 0.6, 0.3), per="head"))],
    "a window by head": [
        Rule.of(dx.SlidingWindow(40), heads=[0, 3, 5]),
        Rule.of(dx.Sink(2) | dx.Strided(30), heads=[1, 2]),
    ],
}


@torch.no_grad()
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_decoder_equals_torch_and_generates_the_same(tmp_path, rules):
    model, ids = llama(), tokens(2, 300)
    policy = Policy(model=model_facts(model), rules=rules, dense_below=200)
    made = export_onnx(model, tmp_path / "out", policy, all_logits=True, form="custom")
    ran = OnnxModel(made.folder, operator="python")
    with dx.apply(model, policy):
        for seqlen in (300, 100):
            some = ids[:, :seqlen]
            found = torch.from_numpy(ran.step(some.numpy())[0])
            torch.testing.assert_close(found, model(some).logits, atol=1e-4, rtol=1e-4)
        mask = torch.ones_like(ids)
        want = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)[:, 300:]
    found = np.stack(list(ran.generate(ids.numpy(), 6)), 1)
    np.testing.assert_array_equal(found[:, : want.shape[1]], want.numpy())


@torch.no_grad()
def test_an_encoder_with_a_window_and_padding(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    bert = BertModel(BertConfig(**sizes, vocab_size=64, max_position_embeddings=700), add_pooling_layer=False).eval()
    ids = tokens(3, 333)
    made = export_onnx(bert, tmp_path / "out", form="custom", window=(130, 7))
    ran = OnnxModel(made.folder, threads=2, operator="python")
    mask = torch.ones_like(ids)
    mask[1, 150:], mask[2, :100] = 0, 0
    with dx.apply(bert, window=(130, 7)):
        for each in (torch.ones_like(ids), mask):
            found = torch.from_numpy(ran.encode(ids.numpy(), each.numpy()))
            want = bert(ids, attention_mask=each)[0]
            torch.testing.assert_close(found[each.bool()], want[each.bool()], atol=1e-4, rtol=1e-4)
    mask[0, 5] = 0
    with pytest.raises(Exception, match="mask has holes in sequence 0"):
        ran.encode(ids.numpy(), mask.numpy())


def test_it_takes_the_place_of_a_library_that_cannot_be_compiled(tmp_path, monkeypatch, caplog):
    def missing():
        raise RuntimeError("there is no C++ compiler")

    made = export_onnx(llama(), tmp_path / "out", form="custom")
    monkeypatch.setattr(session, "library_path", missing)
    with pytest.raises(RuntimeError, match="no C"):
        OnnxModel(made.folder, operator="library").step(tokens(1, 9).numpy())
    logits, _ = OnnxModel(made.folder).step(tokens(1, 9).numpy())
    assert np.isfinite(logits).all()
    assert "runs in Python, with copies" in caplog.text
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="or run it in Python: pip install onnxruntime-extensions"):
        OnnxModel(made.folder).step(tokens(1, 9).numpy())


def test_exports_of_older_versions_are_refused(tmp_path):
    made = export_onnx(llama(), tmp_path / "out", form="custom")
    path = made.folder / "model.onnx"
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        for each in [each for each in node.attribute if each.name == "spec"]:
            node.attribute.remove(each)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(PythonOperatorError, match="export the model again"):
        renamed(path)
