# SPDX-License-Identifier: Apache-2.0
"""Handles: applied and removed, shared and copied models, refused models, and names in metrics."""

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch
from small_models import SPARSE, llama, logits, policy_for, small, tokens

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import attention_layers
from dynaxx.integrations.transformers.calls.layer import warn_once
from dynaxx.policy import MeasuredOn, ModelFacts

transformers = pytest.importorskip("transformers")


def test_remove_and_apply_again_and_two_models():
    one, two, ids = llama(0), llama(1), tokens(1, 100)
    dense = [logits(model, input_ids=ids) for model in (one, two)]
    first = dx.apply(one, policy_for(one, dx.Rule.of(SPARSE)))
    with pytest.raises(ValueError, match="has a policy already"):
        dx.apply(one, policy_for(one))
    second = dx.apply(two, policy_for(two, dx.Rule.of(dx.SlidingWindow(16), layers=[0])))
    assert "3 of 3 layers sparse, active" in repr(first)
    sparse = [logits(model, input_ids=ids) for model in (one, two)]
    assert [h.stats()["sparse_calls"] for h in (first, second)] == [3, 1]
    first.remove()
    first.remove()
    assert not first.active
    assert second.active
    assert torch.equal(logits(one, input_ids=ids), dense[0])
    assert torch.equal(logits(two, input_ids=ids), sparse[1])
    second.remove()
    assert torch.equal(logits(two, input_ids=ids), dense[1])
    assert one.config._attn_implementation == two.config._attn_implementation == "sdpa"
    with dx.apply(one, policy_for(one, dx.Rule.of(SPARSE))):
        assert torch.equal(logits(one, input_ids=ids), sparse[0])


def test_models_that_share_a_config():
    one = llama()
    two = transformers.LlamaForCausalLM(one.config).eval()
    ids = tokens(1, 100)
    dense = logits(two, input_ids=ids)
    first, second = dx.apply(one, policy_for(one)), dx.apply(two, policy_for(two, dx.Rule.of(SPARSE)))
    first.remove()
    assert second.active
    assert not torch.equal(logits(two, input_ids=ids), dense)
    second.remove()
    assert torch.equal(logits(two, input_ids=ids), dense)


def test_a_copy_of_a_model_with_a_policy_is_dense(caplog):
    warn_once.cache_clear()
    model, ids = llama(), tokens(1, 100)
    dense = logits(model, input_ids=ids)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))), caplog.at_level(logging.WARNING, "dynaxx"):
        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin, input_ids=ids), dense)
    assert "has no handle" in caplog.text


def test_a_handle_says_what_to_copy_instead():
    model = llama()
    with dx.apply(model, policy_for(model)) as handle:
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="copy or pickle the model, and call dynaxx"):
                attempt(handle)


def test_a_dropped_model_is_freed():
    model = llama()
    module = weakref.ref(attention_layers(model)[0])
    dx.apply(model, policy_for(model))
    del model
    gc.collect()
    assert module() is None


def test_watchers_see_the_layouts():
    model, seen = llama(), []
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        with handle.watch(lambda layer, layout: seen.append((layer, layout.density()))):
            logits(model, input_ids=tokens(1, 200))
        logits(model, input_ids=tokens(1, 200))
    assert [layer for layer, _ in seen] == [0, 1, 2]
    assert all(0.2 < density < 0.9 for _, density in seen)


def test_models_that_cannot_be_served_are_refused_with_the_reason():
    t = transformers
    facts = {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 8}

    def refuse(model, message, **changes):
        before = model.config._attn_implementation
        policy = dx.Policy(
            model={**facts, **changes, "model_type": model.config.model_type}, rules=(dx.Rule.of(SPARSE),)
        )
        with pytest.raises(dx.UnsupportedInputError, match=message):
            dx.apply(model, policy)
        assert model.config._attn_implementation == before

    flash = small(t.LlamaConfig, t.LlamaForCausalLM)
    flash.config._attn_implementation_internal = "flash_attention_2"
    refuse(flash, r"set_attn_implementation\('sdpa'\)")
    bert = t.BertModel(t.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32))
    refuse(bert, "is not causal", kv_heads=4)
    t5 = t.T5ForConditionalGeneration(t.T5Config(d_model=32, d_ff=32, num_layers=2, num_heads=4, d_kv=8, vocab_size=64))
    refuse(t5, "T5")
    odd = small(t.LlamaConfig, t.LlamaForCausalLM)
    odd.config.num_key_value_heads = 3
    with pytest.raises(
        dx.UnsupportedInputError, match=r"LlamaConfig has no usable heads: `q_heads` must be a multiple"
    ):
        dx.apply(odd)
    with pytest.raises(dx.UnsupportedInputError, match="no transformers"):
        dx.apply(torch.nn.Linear(2, 2), policy_for(llama()))
    with pytest.raises(TypeError, match="`model` must be"):
        dx.apply("llama", policy_for(llama()))
    with pytest.raises(TypeError, match="load_policy"):
        dx.apply(llama(), "policy.json")


@pytest.mark.parametrize(
    ("loaded", "shown"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/home/someone/clients/acme-llama/", "acme-llama"),
        ("../runs/best", "best"),
        ("C:\\Users\\someone\\acme-llama", "acme-llama"),
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/0123abc", "Qwen/Qwen3-8B"),
        ("", "llama"),
        ("./", "llama"),
    ],
)
def test_metrics_name_the_model_and_no_folder_of_anybody(telemetry, loaded, shown):
    model = llama()
    model.config._name_or_path = loaded
    with dx.apply(model, policy_for(model)):
        model(tokens(1, 40))
    names = {series.labels[0] for series in telemetry.snapshot() if series.metric.name == "dynaxx_layer_calls_total"}
    assert names == {shown}


def test_a_relative_path_that_exists_is_no_name_of_a_hub(telemetry, tmp_path, monkeypatch):
    model, folder = llama(), tmp_path / "acme" / "llama"
    model.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained("acme/llama").eval()
    with dx.apply(model, policy_for(model)):
        assert telemetry.value("dynaxx_policy_info", model_name="llama") == 1


@pytest.mark.parametrize("field", ["model_type", "layers", "q_heads", "kv_heads", "head_dim"])
def test_a_policy_for_another_model_is_refused(field):
    facts = {"model_type": "llama", "layers": 3, "q_heads": 6, "kv_heads": 2, "head_dim": 16}
    facts[field] = {"model_type": "gemma3_text", "layers": 4, "q_heads": 12, "kv_heads": 3, "head_dim": 32}[field]
    with pytest.raises(dx.PolicyError, match=f"`model.{field}`.*another model"):
        dx.apply(llama(), dx.Policy(model=facts))


def test_latent_attention_has_a_key_per_query_head_whatever_its_config_says():
    config = transformers.DeepseekV3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=64, kv_lora_rank=16
    )
    assert ModelFacts.of(config).kv_heads == 4


def test_a_model_without_weights_is_on_no_other_machine(caplog):
    with torch.device("meta"):
        model = llama()
    policy = policy_for(model).model_copy(update={"measured_on": MeasuredOn(device="cpu")})
    with dx.apply(model, policy):
        assert "measure it again" not in caplog.text
