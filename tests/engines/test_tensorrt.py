# SPDX-License-Identifier: Apache-2.0
"""Engines of TensorRT for RTX are built, without a GPU, but not run. `make test-tensorrt` runs this with TensorRT."""

import importlib.util
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("onnx")

import dynaxx as dx
from dynaxx.engines.onnx import export_onnx
from dynaxx.engines.tensorrt import EngineSettings, build_engines
from dynaxx.engines.tensorrt.engines import export_model
from dynaxx.integrations.transformers import model_facts
from tiny import llama

needs_tensorrt = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="TensorRT has an environment of its own: make test-tensorrt",
)


def policy_of(model, **fields):
    rules = (dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(64)),)
    return dx.Policy(model=model_facts(model), block_size=32, rules=rules, **fields)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("tensorrt"), llama()
    export_onnx(model, folder / "sparse", policy_of(model), form="portable")
    return folder


@needs_tensorrt
@pytest.mark.slow
@pytest.mark.parametrize("cards", [("8.9",), ("8.0", "12.0")])
def test_engines_are_built_for_each_graph(exported, tmp_path, cards):
    settings = EngineSettings(compute_capability=cards, max_prompt=512, max_cache=1024, max_batch=2)
    result = build_engines(exported / "sparse", tmp_path / "engines", settings)
    assert set(result["engines"]) == {"prefill", "decode"}
    for graph, size in result["engines"].items():
        assert (tmp_path / "engines" / f"{graph}.engine").stat().st_size == size > 100_000
    manifest = json.loads((tmp_path / "engines" / "dynaxx.json").read_text())
    assert manifest["compute_capability"] == list(cards)
    assert manifest["shapes"] == {"max_batch": 2, "max_prompt": 512, "max_cache": 1024}
    with pytest.raises(ValueError, match="already exists"):
        build_engines(exported / "sparse", tmp_path / "engines")


@needs_tensorrt
@pytest.mark.slow
def test_the_command_builds_engines_from_a_model(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "model")
    result = export_model(tmp_path / "model", policy_of(model), tmp_path / "engines", {"max_prompt": "256"})
    assert set(result["engines"]) == {"prefill", "decode"}
    assert (tmp_path / "engines" / "config.json").exists()


@needs_tensorrt
@pytest.mark.slow
def test_a_graph_that_tensorrt_refuses_says_why(exported, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "dynaxx.json").write_text((exported / "sparse" / "dynaxx.json").read_text())
    (folder / "prefill.onnx").write_bytes(b"no graph")
    with pytest.raises(dx.UnsupportedInputError, match=r"prefill\.onnx"):
        build_engines(folder, tmp_path / "engines")
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"compute_capability": ("9.0",)}, "`compute_capability` must be some of 7.5"),
        ({"compute_capability": ()}, "some"),
        ({"compute_capability": ("8.9", "8.9")}, "some"),
        ({"max_batch": 0}, "`max_batch`"),
        ({"max_prompt": 1.5}, "`max_prompt`"),
    ],
)
def test_bad_settings_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        EngineSettings(**fields)


def test_bad_folders_and_options_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="dynaxx export --format onnx"):
        build_engines(tmp_path, tmp_path / "engines")
    (tmp_path / "dynaxx.json").write_text(
        json.dumps({"format": "dynaxx.onnx", "version": 1, "form": "custom", "graphs": []})
    )
    with pytest.raises(ValueError, match="portable form of a decoder"):
        build_engines(tmp_path, tmp_path / "engines")
    with pytest.raises(ValueError, match="--option x is not one of"):
        export_model(tmp_path, None, tmp_path / "engines", {"x": "1"})
    with pytest.raises(ValueError, match="--option max_batch must be a number"):
        export_model(tmp_path, None, tmp_path / "engines", {"max_batch": "-1"})
