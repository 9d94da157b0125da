# SPDX-License-Identifier: Apache-2.0
"""Exported graphs in ONNX Runtime say what torch says; what cannot be written is refused before the work."""

import errno
import json

import numpy as np
import onnx
import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.onnx import OnnxModel, export_onnx
from dynaxx.integrations.onnx import export as export_module
from dynaxx.integrations.transformers import model_facts
from dynaxx.policy import Policy, Rule
from tiny import llama, tokens

pytestmark = pytest.mark.slow  # an export takes ten seconds

WINDOW = dx.SlidingWindow(100) | dx.Sink(5)


def policy_of(model, **fields):
    return Policy(model=model_facts(model), rules=[Rule.of(WINDOW)], **fields)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = llama()
    folder = tmp_path_factory.mktemp("onnx") / "tiny"
    return model, policy_of(model, dense_below=64), export_onnx(model, folder, policy_of(model, dense_below=64))


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


@torch.no_grad()
def test_it_generates_the_tokens_of_torch(exported):
    model, policy, made = exported
    ids = tokens(2, 200)
    with dx.apply(model, policy):
        mask = torch.ones_like(ids)
        want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)[:, 200:]
    found = np.stack(list(OnnxModel(made.folder).generate(ids.numpy(), 12)), 1)
    np.testing.assert_array_equal(found[:, : want.shape[1]], want.numpy())


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


def test_nothing_is_overwritten_and_nothing_half_written(exported, tmp_path, monkeypatch):
    model, policy, made = exported
    with pytest.raises(ValueError, match="already exists"):
        export_onnx(model, made.folder, policy)
    with pytest.raises(ValueError, match="eval mode"):
        export_onnx(llama().train(), tmp_path / "a", policy)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_module._Export, "graphs", lambda *args: {})
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
