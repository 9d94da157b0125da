# SPDX-License-Identifier: Apache-2.0
"""Policies in vLLM's engine: the layers that they bind, reloads, and the contract. These tests need no vLLM."""

import zipfile

import pytest
import torch
from paged_steps import DECODE, FACTS, Batch, Namespace, policy_of

import dynaxx as dx
import vllm_source
from dynaxx.integrations.vllm import contract as vllm_contract
from dynaxx.integrations.vllm import engine as vllm_engine


def config(**changes):
    """Return the part of vLLM's configuration that a policy is compared with."""
    facts = Namespace(
        model_type="llama", num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16
    )
    made = Namespace(
        model_config=Namespace(hf_text_config=facts, served_model_name="tiny"),
        cache_config=Namespace(cache_dtype="auto", block_size=128),
        parallel_config=Namespace(
            tensor_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *parts, name = path.split("__")
        at = made
        for part in parts:
            at = getattr(at, part)
        setattr(at, name, value)
    return made


def attention(**changes):
    """Return an object with the attributes of vLLM's `Attention` that the plugin reads."""
    layer = Namespace(
        impl=Namespace(scale=0.25, sinks=None, alibi_slopes=None, logits_soft_cap=0),
        attn_type="decoder", sliding_window=None, kv_sharing_target_layer_name=None, head_size=16, head_size_v=16,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(layer.impl if hasattr(layer.impl, name) else layer, name, value)
    return layer


def engine(tmp_path, policy=None, **changes):
    path = tmp_path / "policy.json"
    dx.save_policy(policy or policy_of(), path)
    made = config(**changes)
    return vllm_engine.Engine(str(path), made, 0), made


def test_an_engine_binds_the_layers_with_rules(tmp_path, telemetry):
    found, keep = engine(tmp_path)
    assert found.serves(keep)
    assert found.bind(1, attention(), 128) is None
    assert found.bind(0, attention(sliding_window=40), 128) is None
    assert not found.status()["active"]
    assert found.bind(0, attention(), 128).softmax == (0.25, None, None)
    assert found.status()["active"]
    assert found.status()["sparse_layers"] == [0]
    assert telemetry.value("dynaxx_events_total", event="policy_loaded", model_name="tiny", engine="0") == 1
    found.kill_switch.engage("test")
    assert found.step(Batch().sequences).killed
    assert telemetry.value("dynaxx_kill_switch", model_name="tiny", engine="0") == 1
    found.kill_switch.release()
    assert not found.step(Batch().sequences).killed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_config__hf_text_config__num_hidden_layers": 3},
            "`model.layers` is 2 in the policy and 3",
        ),
        (
            {"cache_config__cache_dtype": "fp8_e5m2"},
            "kv cache dtype 'fp8_e5m2' is not supported; use --kv-cache-dtype auto or fp8",
        ),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism is not supported"),
        ({"speculative_config": Namespace(method="eagle")}, "speculative method 'eagle'"),
        ({"model_config__is_mm_prefix_lm": True}, "bidirectional attention"),
        ({"model_config__rswa_window": 5}, "reference sliding window"),
        (
            {"policy": policy_of(DECODE), "cache_config__block_size": 24},
            "pages of 24 tokens, decode rules .16.; use --block-size 16",
        ),
        (
            {"policy": policy_of(DECODE, DECODE.model_copy(update={"layers": (1,), "block_size": 32}))},
            "decode rules have pages of .16, 32. tokens",
        ),
        ({"policy": policy_of(rollout={"share": 0.5})}, "`rollout.share`"),
        ({"policy": policy_of(dx.Rule.of(dx.GlobalContent((5,))))}, "need token ids"),
        ({"policy": policy_of(guard={}), "parallel_config__tensor_parallel_size": 2}, "`guard` watches whole layers"),
    ],
)
def test_unserved_layers_are_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        engine(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi_slopes": torch.zeros(6)},
        {"attn_type": "encoder_only"},
        {"kv_sharing_target_layer_name": "model.layers.0.attn"},
        {"head_size_v": 8},
    ],
)
def test_layers_that_cannot_follow_a_rule_are_refused(tmp_path, changes):
    found, _keep = engine(tmp_path)
    with pytest.raises(dx.UnsupportedInputError, match="layer 0 of llama with a rule"):
        found.bind(0, attention(**changes), 128)


def test_a_layer_keeps_its_models_softmax(tmp_path):
    found, _keep = engine(tmp_path)
    softmax = found.bind(0, attention(sinks=torch.zeros(6), logits_soft_cap=30.0), 128).softmax
    assert softmax.softcap == 30.0
    assert softmax.sinks.shape == (6,)
    found, _keep = engine(tmp_path, policy_of(guard={}))
    for changes in ({"sinks": torch.zeros(6)}, {"logits_soft_cap": 30.0}):
        with pytest.raises(dx.UnsupportedInputError, match="remove the guard"):
            found.bind(0, attention(**changes), 128)


def test_decode_rules_need_their_pages(tmp_path):
    found, _keep = engine(tmp_path, policy_of(DECODE), cache_config__block_size=16)
    with pytest.raises(dx.UnsupportedInputError, match="its pages have 24 tokens, no multiple of its decode rule's 16"):
        found.bind(0, attention(), 24)
    assert found.bind(0, attention(), 16) is not None
    assert found.bind(0, attention(), 64) is not None


def test_a_new_policy_comes_into_force_and_a_bad_one_does_not(tmp_path, telemetry):
    found, _keep = engine(tmp_path)
    found.bind(0, attention(), 128)
    batch = Batch()
    before = found.step(batch.sequences)
    assert not found.replace(policy_of())
    assert found.replace(policy_of(dense_below=1000))
    assert before.split(0).sparse  # the step that runs keeps its own
    assert not found.step(batch.sequences).split(0).sparse
    with pytest.raises(dx.PolicyError, match=r"rules for layers \[1\], which had none when the engine started"):
        found.replace(policy_of(dx.Rule.of(dx.SlidingWindow(9))))
    with pytest.raises(dx.PolicyError, match="is for another model"):
        found.replace(dx.Policy(model=FACTS.model_copy(update={"layers": 7})))
    assert found.policy.dense_below == 1000
    assert found.replace(policy_of(dx.Rule.of(None)))
    assert found.step(batch.sequences).split(0).reasons["no rule"] == 7


def test_the_contract_says_what_moved():
    def load(name):
        if name == "gone":
            raise ImportError("no such module")

        class Impl:
            def forward(self, layer, q):
                pass

        return Namespace(Impl=Impl)

    needs = (
        vllm_contract.Need("gone", "Impl"),
        vllm_contract.Need("here", "Other"),
        vllm_contract.Need("here", "Impl.forward", ("layer", "query")),
        vllm_contract.Need("here", "Impl", attributes=("forward", "backward")),
        vllm_contract.Need("here", "Impl.forward", ("layer",), ("__name__",)),
    )
    found = vllm_contract.broken(needs, load)
    assert [line.split(" ", 1)[0] for line in found] == ["gone.Impl", "here.Other", "here.Impl.forward", "here.Impl"]
    assert "takes (layer, q), not (layer, query, ...)" in found[2]
    assert found[3].endswith("has no backward")


SOURCES = {
    "here/__init__.py": "from .base import Impl\nfrom elsewhere import Other\n",
    "here/base.py": """
class Base(Outside):
    def shared(self, a, *, b=1, **rest): ...

if True:
    class Impl(Base):
        x: int
        @property
        def y(self): ...
        def forward(self, layer, q=None, *more): ...
""",
}


def test_the_contract_reads_a_wheel_without_importing_it(tmp_path):
    path = tmp_path / "vllm-9.9.9-cp38-abi3-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in SOURCES.items():
            wheel.writestr(name, text)
    load = vllm_source.Sources.of_wheel(path).load
    fits = (
        vllm_contract.Need("here", "Impl", attributes=("x", "y", "shared")),
        vllm_contract.Need("here", "Impl.forward", ("layer", "q")),
        vllm_contract.Need("here.base", "Impl.shared", ("a", "b")),
    )
    assert vllm_contract.broken(fits, load) == []
    broken = (
        vllm_contract.Need("gone", "Impl"),
        vllm_contract.Need("here", "Other"),
        vllm_contract.Need("here", "Impl", attributes=("z",)),
        vllm_contract.Need("here", "Impl.forward", ("layer", "query")),
    )
    assert [line.split(" ", 1)[0] for line in vllm_contract.broken(broken, load)] == [
        *("gone.Impl", "here.Other", "here.Impl", "here.Impl.forward")
    ]
    assert all(vllm_source.problems(vllm_source.Sources.of_wheel(path)).values())
