# SPDX-License-Identifier: Apache-2.0
"""A policy is said in `sparse_attention_config` of a config.json and read from it, or refused with the reason.

The schema is recorded from Model-Optimizer 0.47: `export_sparse_attention_config` writes the entry, and
`load_from_checkpoint_metadata` reads it. TensorRT-LLM reads the same, and wants a formula over `target_sparsity`.
"""

import json
import math
import resource
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dynaxx as dx
from dynaxx.cli.export import Format, _exporter
from dynaxx.engines.tensorrt_llm import policy_of_config, sparse_attention_config
from dynaxx.errors import UnsupportedInputError
from dynaxx.policy import Guard, ModelFacts, Rollout

MODEL = ModelFacts(model_type="llama", layers=12, q_heads=4, kv_heads=2, head_dim=64)
RULE = dx.Threshold(0.02, of="max", per="head")
EXPORTED: dict[str, Any] = {  # the example in Model-Optimizer's docstring, without its second group
    "config_groups": {
        "group_0": {
            "algorithm": "skip_softmax",
            "targets": ["LlamaAttention"],
            "threshold_scale_factor": {
                "formula": "a * exp(b * target_sparsity)",
                "prefill": {"a": 7.93, "b": 8.61},
                "decode": {"a": 0.12, "b": 9.85},
            },
            "target_sparsity": {"prefill": 0.5},
        }
    },
    "producer": {"name": "modelopt", "version": "0.37.0"},
}
SPARSE_SOFTMAX = {"algorithm": "sparse_softmax", "sparsity_n": 2, "sparsity_m": 4, "dense_recent_tokens": 64}


def policy(rule: Any = RULE, **fields: Any) -> dx.Policy:
    where = {name: fields.pop(name) for name in ("layers", "heads", "phase") if name in fields}
    return dx.Policy(**{"model": MODEL, "block_size": 128, "rules": (dx.Rule.of(rule, **where),), **fields})


def config(entry: Any = EXPORTED, **group: Any) -> Any:
    if group:
        entry = {"config_groups": {"group_0": {**EXPORTED["config_groups"]["group_0"], **group}}}
    return SimpleNamespace(
        model_type="llama",
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sparse_attention_config=entry,
    )


def engine_threshold(entry: Any, layer: int, phase: str, seqlen: int) -> float | None:
    """Return the threshold that Model-Optimizer's and TensorRT-LLM's readers give a layer, None for dense."""
    (group,) = (each for each in entry["config_groups"].values() if each["algorithm"] == "skip_softmax")
    if any(fnmatch(f"model.layers.{layer}.self_attn", f"*{name}*") for name in group.get("ignore", [])):
        return None
    factor, target = group["threshold_scale_factor"], group["target_sparsity"]
    if phase not in target or phase not in factor:
        return None
    assert factor["formula"] == "a * exp(b * target_sparsity)"
    return factor[phase]["a"] * math.exp(factor[phase]["b"] * target[phase]) / seqlen


def test_engines_read_the_policys_threshold() -> None:
    entry = json.loads(json.dumps(sparse_attention_config(policy(layers=[0, 2, 11]), seqlen=131_072)))
    read = {layer: engine_threshold(entry, layer, "prefill", 131_072) for layer in range(12)}
    assert read == {layer: pytest.approx(0.02) if layer in (0, 2, 11) else None for layer in range(12)}
    assert engine_threshold(entry, 0, "decode", 131_072) is None
    assert engine_threshold(entry, 0, "prefill", 65_536) == pytest.approx(0.04)
    assert entry["config_groups"]["group_0"]["ignore"][0] == "model.layers.1.self_attn"
    dense = dx.Rule.of(None, layers=[5])
    stated = policy(rules=(dx.Rule.of(RULE, layers=[*range(5), *range(6, 12)]), dense))
    assert sparse_attention_config(stated, seqlen=4096)["config_groups"]["group_0"]["ignore"] == [
        "model.layers.5.self_attn"
    ]
    assert "ignore" not in sparse_attention_config(policy(), seqlen=4096)["config_groups"]["group_0"]


def test_the_policy_comes_back() -> None:
    given = policy(layers=[1, 3])
    assert policy_of_config(config(sparse_attention_config(given, seqlen=8192)), seqlen=8192) == given


def test_a_calibrated_checkpoint_is_read() -> None:
    found = policy_of_config(config(ignore=["layers.0.self_attn", "model.layers.11.*"]), seqlen=65_536, decode="dense")
    assert found.rules[0].layers == tuple(range(1, 11))
    assert found.rules[0].attention.build().share == pytest.approx(7.93 * math.exp(8.61 * 0.5) / 65_536)
    assert (found.model, found.block_size) == (MODEL, 128)


@pytest.mark.parametrize(
    ("rule", "fields", "said"),
    [
        (dx.TopK(0.3), {}, "compares with a row's maximum"),
        (dx.SlidingWindow(1024), {}, "not SlidingWindow"),
        (dx.Sink(64) | dx.SlidingWindow(1024) | RULE, {}, "cannot promise"),
        (dx.Threshold(0.02, of="uniform", per="head"), {}, 'of="max"'),
        (dx.Threshold(0.02), {}, 'per="head"'),
        (dx.Threshold(0.0, per="head"), {}, "between 0 and 1"),
        (dx.Threshold((0.1, 0.1, 0.2, 0.1), per="head"), {}, "the policy has 2"),
        (RULE, {"heads": [0, 1]}, "all heads of a layer"),
        (RULE, {"block_size": 64}, "block_size 128"),
        (RULE, {"dense_below": 4096}, "from 4096 keys"),
        (RULE, {"guard": Guard()}, "no guard"),
        (RULE, {"rollout": Rollout(share=0.5)}, "no rollout"),
        (RULE, {"rules": ()}, "the policy has 0"),
        (dx.TopK(0.5), {"phase": "decode"}, "phase decode"),
    ],
)
def test_other_policies_are_refused(rule: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedInputError, match="tensorrt_llm") as caught:
        sparse_attention_config(policy(rule, **fields), seqlen=131_072)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("read", "decode", "said"),
    [
        (config(), "refuse", "no decode rule has a threshold"),
        (config(None), "dense", "as Model-Optimizer writes"),
        (config({"use_sparse_attention": True, "sparse_topk_blocks": 16}), "dense", "as Model-Optimizer writes"),
        (config({"config_groups": {"group_0": SPARSE_SOFTMAX}}), "dense", "'sparse_softmax'"),
        (config({"config_groups": {**EXPORTED["config_groups"], "b": SPARSE_SOFTMAX}}), "dense", "'sparse_softmax'"),
        (config(target_sparsity={"decode": 0.5}), "dense", "target_sparsity"),
        (config(threshold_scale_factor={"formula": "a", "prefill": {"a": 1}}), "dense", "formula"),
        (config(threshold_scale_factor={"formula": "a * exp(b * target_sparsity)"}), "dense", "prefill its a, b"),
        (config(target_sparsity=1.0), "dense", "between 0 and 1"),
        (config(ignore=["cross_attn"]), "dense", "no attention layer"),
        (config(ignore=["self_attn"]), "dense", "every layer"),
        (config(initial_disabled_steps=3), "dense", "diffusion"),
    ],
)
def test_other_entries_are_refused(read: Any, decode: Any, said: str) -> None:
    with pytest.raises(UnsupportedInputError, match="tensorrt_llm") as caught:
        policy_of_config(read, seqlen=16_384, decode=decode)
    assert said in str(caught.value)


def test_the_command_writes_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 7}')
    exporter = _exporter(Format["tensorrt_llm"])
    said = exporter(tmp_path, policy(), tmp_path / "out", {"seqlen": "4096"})
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"model_type": "llama", "vocab_size": 7, "sparse_attention_config": said}
    for options in ({}, {"seqlen": "0"}, {"seqlen": "4096", "form": "auto"}):
        with pytest.raises(ValueError, match="seqlen=TOKENS"):
            exporter(tmp_path, policy(), tmp_path / "out", options)
    with pytest.raises(ValueError, match="needs a policy"):
        exporter(tmp_path, None, tmp_path / "out", {"seqlen": "4096"})


def test_a_full_disk_leaves_the_models_config_whole(tmp_path: Path) -> None:
    config, limit = tmp_path / "config.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    config.write_text('{"model_type": "llama"}')
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=r"config\.json"):
            _exporter(Format["tensorrt_llm"])(tmp_path, policy(), tmp_path, {"seqlen": "4096"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert config.read_text() == '{"model_type": "llama"}'
    assert list(tmp_path.iterdir()) == [config]
