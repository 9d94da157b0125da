# SPDX-License-Identifier: Apache-2.0
"""Longformer and LED on dynaxx against transformers' own code on random weights: outputs, gradients, removal."""

import copy
import gc
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.encoders import apply_to_encoder
from encoders import assert_as_exact_as_transformers, hidden

transformers = pytest.importorskip("transformers")
from dynaxx.integrations.encoders import longformer as adapter  # noqa: E402  (needs transformers)

LENGTHS = (1, 31, 32, 33, 130)


def config(**changes):
    fields = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "attention_window": [8, 32], "max_position_embeddings": 400, "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0, "initializer_range": 0.2, "pad_token_id": 1,
    }  # fmt: skip
    return transformers.LongformerConfig(**{**fields, **changes})


def longformer(kind="LongformerModel", **changes):
    torch.manual_seed(0)
    return getattr(transformers, kind)(config(**changes)).eval()


def led():
    torch.manual_seed(0)
    settings = transformers.LEDConfig(
        vocab_size=64, d_model=64, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, attention_window=[16, 32],
        max_encoder_position_embeddings=300, dropout=0.0, attention_dropout=0.0, init_std=0.2,
    )  # fmt: skip
    return transformers.LEDModel(settings).eval()


def inputs_of(length, padding="none", globals_="cls", batch=2):
    chance = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 64, (batch, length), generator=chance)
    seen = torch.ones_like(ids)
    if padding == "right":
        seen[0, length // 2 :], seen[1, max(1, length - 3) :] = 0, 0
    elif padding == "left":
        seen[0, : length // 2] = 0
    elif padding == "anywhere":
        seen = (torch.rand(ids.shape, generator=chance) < 0.7).long()
        seen[-1] = 0  # a sequence of padding alone
    is_global = torch.zeros_like(ids)
    if globals_ == "cls":
        is_global[:, 0] = 1
    elif globals_ == "anywhere":
        is_global = (torch.rand(ids.shape, generator=chance) < 0.2).long()
        is_global[0], is_global[:, -1] = 0, 1
    elif globals_ == "all":
        is_global[:] = 1
    return {"input_ids": ids, "attention_mask": seen, "global_attention_mask": is_global}


@pytest.mark.parametrize("globals_", ["none", "cls", "anywhere", "all"])
@pytest.mark.parametrize("padding", ["none", "right", "left", "anywhere"])
def test_outputs(padding, globals_):
    model = longformer()
    for length in LENGTHS if padding == "right" else (33, 130):
        assert_as_exact_as_transformers(model, inputs_of(length, padding, globals_))


@pytest.mark.parametrize("globals_", ["none", "cls", "anywhere"])
def test_exact_in_fp64(globals_):
    model, inputs = longformer().double(), inputs_of(70, "right", globals_)
    own = hidden(model, inputs)
    with apply_to_encoder(model):
        torch.testing.assert_close(hidden(model, inputs), own, atol=2e-6, rtol=0)  # transformers' softmax is in fp32


def test_without_masks_and_with_embeddings():
    model = longformer()
    assert_as_exact_as_transformers(model, {"input_ids": inputs_of(50)["input_ids"]})
    assert_as_exact_as_transformers(model, {"inputs_embeds": torch.randn(2, 37, 128)})


@pytest.mark.parametrize("globals_", ["none", "anywhere"])
def test_led(globals_):
    model = led()
    inputs = inputs_of(70, "right", globals_)
    own = model(**inputs).encoder_last_hidden_state
    with dx.apply(model) as handle:
        torch.testing.assert_close(model(**inputs).encoder_last_hidden_state, own, atol=2e-5, rtol=2e-5)
        assert handle.stats()["sparse_calls"] == 2


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("globals_", ["none", "cls", "anywhere"])
def test_gradients(globals_, checkpointing):
    model, inputs = longformer().train(), inputs_of(70, "right", globals_)
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    towards = torch.randn(2, 70, 128, generator=torch.Generator().manual_seed(5))

    def gradients():
        model.zero_grad()
        (model(**inputs).last_hidden_state * towards).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with apply_to_encoder(model) as handle:
        found = gradients()
        assert handle.stats()["dense_calls"] == {}
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert expected.keys() <= found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected.get(name, torch.zeros_like(gradient)), rtol=1e-3, atol=1e-5 * largest
        )


def test_one_training_step_after_inference_mode_on_the_same_inputs():
    model, inputs = longformer(), inputs_of(33, "right")
    with apply_to_encoder(model), torch.inference_mode():
        model(**inputs)
    with apply_to_encoder(model):
        with torch.inference_mode():
            model(**inputs)
        model(**inputs).last_hidden_state.sum().backward()


@pytest.mark.parametrize("globals_", ["cls", "all"])
def test_few_global_tokens_need_no_projected_sequence(globals_, monkeypatch):
    """Few global tokens use absorbed projections; many, and projections with hooks, use projected keys."""
    model, inputs = longformer(), inputs_of(40, "none", globals_)
    own = hidden(model, inputs)
    called = []
    few = adapter._WindowAttention._few_global_rows
    monkeypatch.setattr(
        adapter._WindowAttention, "_few_global_rows", lambda self, *a: called.append(1) or few(self, *a)
    )
    with apply_to_encoder(model):
        hidden(model, inputs)
        assert len(called) == (2 if globals_ == "cls" else 0)
        hook = model.encoder.layer[0].attention.self.key_global.register_forward_hook(lambda m, a, out: out * 2)
        changed = hidden(model, inputs)
        hook.remove()
        assert len(called) == (3 if globals_ == "cls" else 0)
        assert not torch.allclose(changed, own)
    hook = model.encoder.layer[0].attention.self.key_global.register_forward_hook(lambda m, a, out: out * 2)
    torch.testing.assert_close(hidden(model, inputs), changed, atol=2e-5, rtol=1e-4)
    hook.remove()


def test_attention_weights_come_from_transformers():
    model, inputs = longformer(), inputs_of(40, "right", "anywhere")
    own = model(**inputs, output_attentions=True)
    with apply_to_encoder(model) as handle:
        ours = model(**inputs, output_attentions=True)
        assert handle.stats() == {"sparse_calls": 0, "dense_calls": {"output_attentions": 2}}
    for a, b in zip(own.attentions + own.global_attentions, ours.attentions + ours.global_attentions, strict=True):
        assert torch.equal(a, b)


def test_hidden_states_are_those_of_transformers():
    model, inputs = longformer(), inputs_of(40)
    own = model(**inputs, output_hidden_states=True).hidden_states
    with apply_to_encoder(model):
        for a, b in zip(own, model(**inputs, output_hidden_states=True).hidden_states, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_dropout_of_attention_runs_in_transformers_and_is_counted():
    model = longformer(attention_probs_dropout_prob=0.5).train()
    with apply_to_encoder(model) as handle:
        torch.manual_seed(3)
        ours = model(**inputs_of(40)).last_hidden_state
        assert handle.stats() == {"sparse_calls": 0, "dense_calls": {"attention dropout": 2}}
        model.eval()
        model(**inputs_of(40))
        assert handle.stats()["sparse_calls"] == 2
        handle.reset_stats()
        assert handle.stats() == {"sparse_calls": 0, "dense_calls": {}}
    torch.manual_seed(3)
    assert torch.equal(model.train()(**inputs_of(40)).last_hidden_state, ours)


def test_a_mask_written_to_is_read_again():
    model = longformer()
    attention = model.encoder.layer[0].attention.self
    states, mask = torch.randn(1, 64, 128), torch.zeros(1, 64)

    def run():
        flags = {
            "is_index_masked": mask < 0,
            "is_index_global_attn": mask > 0,
            "is_global_attn": bool((mask > 0).any()),
        }
        with torch.no_grad():
            return model.encoder.layer[0].attention.self(states, attention_mask=mask, **flags)[0]

    with apply_to_encoder(model):
        assert model.encoder.layer[0].attention.self is not attention
        run()
        mask[0, 40:], mask[0, 3] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
        ours = run()
    torch.testing.assert_close(run(), ours, atol=1e-5, rtol=1e-5)


def test_replaced_modules_share_everything_and_are_restored():
    model = longformer("LongformerForSequenceClassification", num_labels=3)
    modules, parameters, names = list(model.modules()), list(model.parameters()), list(model.state_dict())
    with apply_to_encoder(model) as handle:
        assert handle.active
        assert "2 layers, active" in repr(handle)
        assert list(model.state_dict()) == names
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert [type(m) for m in model.modules()] != [type(m) for m in modules]
        with pytest.raises(ValueError, match="runs on dynaxx already"):
            apply_to_encoder(model)
        model.train()
    assert not handle.active
    assert "removed" in repr(handle)
    handle.remove()
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_changes_made_while_applied_stay():
    """Children and weights that adapters or loading add while dynaxx is applied stay in the model after removal."""
    model, inputs = longformer(), inputs_of(40)
    handle = apply_to_encoder(model)
    model.encoder.layer[0].attention.self.query = torch.nn.Sequential(model.encoder.layer[0].attention.self.query)
    model.load_state_dict({name: x * 1.5 for name, x in model.state_dict().items()})
    ours = hidden(model, inputs)
    handle.remove()
    assert isinstance(model.encoder.layer[0].attention.self.query, torch.nn.Sequential)
    torch.testing.assert_close(hidden(model, inputs), ours, atol=1e-4, rtol=1e-4)


def test_saved_while_applied_loads_as_a_plain_model(tmp_path):
    model, inputs = longformer(), inputs_of(40)
    own = hidden(model, inputs)
    with apply_to_encoder(model):
        model.save_pretrained(tmp_path)
    again = transformers.LongformerModel.from_pretrained(tmp_path).eval()
    assert torch.equal(hidden(again, inputs), own)
    with apply_to_encoder(again):
        torch.testing.assert_close(hidden(again, inputs), own, atol=2e-5, rtol=1e-4)


def test_copies_and_pickles_are_plain_models():
    """What is copied or saved under a handle has the modules of transformers, and a handle may be applied to it."""
    model, inputs = longformer(), inputs_of(40)
    own, types = hidden(model, inputs), [type(m) for m in model.modules()]
    with apply_to_encoder(model) as handle:
        hidden(model, inputs)
        file = io.BytesIO()
        torch.save(model, file)
        assert b"dynaxx" not in file.getvalue()
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(hidden(other, inputs), own)
            assert [type(m) for m in other.modules()] == types
            with apply_to_encoder(other):
                hidden(other, inputs)
            assert torch.equal(hidden(other, inputs), own)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="copy or pickle the model"):
                attempt(handle)


def test_worker_processes_run_on_dynaxx():
    """A process that `multiprocessing` spawns gets the model as it is under the handle."""
    model, inputs = longformer(), inputs_of(40)
    with apply_to_encoder(model):
        ours = hidden(model, inputs)
        there = pickle.loads(ForkingPickler.dumps(model))
    with pytest.raises(ValueError, match="runs on dynaxx already"):
        apply_to_encoder(there)
    assert torch.equal(hidden(there, inputs), ours)


def test_modules_that_were_moved_or_wrapped_are_restored():
    model, inputs = longformer(), inputs_of(40)
    own = hidden(model, inputs)
    handle, layers = apply_to_encoder(model), model.encoder.layer
    layers.append(copy.deepcopy(layers[1]))
    layers[0].attention.self = torch.nn.ModuleDict({"base": layers[0].attention.self})
    layers[1].attention.self.note = "kept"
    handle.remove()
    assert not handle.active
    layers[0].attention.self = layers[0].attention.self["base"]
    del layers[2]
    assert layers[1].attention.self.note == "kept"
    assert torch.equal(hidden(model, inputs), own)


def test_half_precision():
    model, inputs = longformer(), inputs_of(70, "right", "anywhere")
    exact = hidden(model, inputs)
    model = model.to(torch.bfloat16)
    own = hidden(model, inputs)
    with apply_to_encoder(model):
        ours = hidden(model, inputs)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().max() <= 2 * (own - exact).abs().max()


@pytest.mark.parametrize("globals_", ["cls", "all"])
def test_autocast(globals_):
    model, inputs = longformer(), inputs_of(70, "right", globals_)
    exact = hidden(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = hidden(model, inputs)
        with apply_to_encoder(model):
            ours = hidden(model, inputs)
    assert ours.dtype == own.dtype
    assert (ours - exact).abs().max() <= 2 * (own - exact).abs().max()


def test_nothing_of_a_pass_keeps_its_mask_alive():
    model = longformer()
    with apply_to_encoder(model):
        hidden(model, inputs_of(40))
        known = model.encoder.layer[0].attention.self.dynaxx._pass
        gc.collect()
        assert known[0]() is None


def test_an_exported_or_compiled_model_runs_as_before():
    model, inputs = longformer(), inputs_of(32)
    own = hidden(model, inputs)
    model.config.onnx_export = True
    with apply_to_encoder(model) as handle:
        torch.testing.assert_close(hidden(model, inputs), own, atol=1e-5, rtol=1e-5)
        assert handle.stats()["dense_calls"] == {"compiled or exported": 2}


@pytest.mark.parametrize("wrong", [None, "a model", torch.zeros(3)])
def test_no_model_is_refused(wrong):
    with pytest.raises(TypeError, match="must be a transformers model"):
        dx.apply(wrong)


def test_other_models_and_choices_are_refused():
    t5 = transformers.T5Model(
        transformers.T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(dx.UnsupportedInputError, match="cross attention is not supported"):
        dx.apply(t5)
    assert not hasattr(t5, "dynaxx")
    with pytest.raises(ValueError, match="`name` must be empty for Longformer"):
        dx.apply(longformer(), name="longformer")
