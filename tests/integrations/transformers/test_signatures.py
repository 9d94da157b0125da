# SPDX-License-Identifier: Apache-2.0
"""What an attention call depends on: layers of one model that differ, arguments of callers, weights, holes, images."""

import copy
import inspect

import pytest
import torch
from small_models import KEEP_ALL, close, gemma3, llama, logits, policy_for, tokens

import dynaxx as dx
from dynaxx.integrations.transformers.calls import own_planning
from dynaxx.integrations.transformers.calls.dense_fallback import attention_of, names_read
from dynaxx.integrations.transformers.decoder import COMPILERS_READ_NAMES

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def short_border(monkeypatch):
    monkeypatch.setitem(own_planning.BORDERS, "cpu", dict.fromkeys(("causal", "masked", "eager"), 32))


def applied(model, *rules):
    return dx.apply(model, policy_for(model, *rules)) if rules else dx.apply(model)


@pytest.mark.parametrize("causal", [(1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("with_policy", [False, True])
def test_layers_that_differ_in_causality(causal, with_policy):
    model, ids = llama(), tokens(2, 130)
    for layer, is_causal in zip(model.model.layers, causal, strict=True):
        layer.self_attn.is_causal = bool(is_causal)
    dense = logits(model, input_ids=ids)
    rules = [dx.Rule.of(dx.SlidingWindow(4096), layers=[i for i, each in enumerate(causal) if each])]
    with applied(model, *(rules if with_policy else ())) as handle:
        for _ in range(2):
            close(logits(model, input_ids=ids), dense)
        counts = handle.stats()
    assert counts["sparse_calls" if with_policy else "own_pattern_calls"] == 2 * sum(causal)


def test_a_layer_that_stops_being_causal_after_apply_does_not_follow_its_rule():
    model, ids = llama(), tokens(2, 130)
    with applied(model, dx.Rule.of(KEEP_ALL)) as handle:
        model.model.layers[1].self_attn.is_causal = False
        got = logits(model, input_ids=ids)
        assert handle.stats()["dense_calls"] == {"not causal": 1}
    close(got, logits(model, input_ids=ids))


def test_a_recomputed_layer_that_is_not_causal_gets_the_mask_of_the_forward_pass():
    """GPT-2 hands its mask on by position, so that reentrant checkpointing detaches it."""
    sizes = {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model, ids = transformers.GPT2LMHeadModel(config).train(), tokens(2, 90)
    model.transformer.h[0].attn.is_causal = False
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": True})
    model.enable_input_require_grads()

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [each.grad.clone() for each in model.parameters()]

    own = gradients()
    with applied(model):
        close(gradients(), own)


def test_the_original_attention_says_which_arguments_matter():
    module = llama().model.layers[0].self_attn
    assert names_read(attention_of(module, "eager")) == {"scaling", "dropout"}
    assert {"position_bias", "is_causal", "scaling"} <= names_read(attention_of(module, "sdpa"))
    assert "labels" not in names_read(attention_of(module, "sdpa"))

    def hands_on(module, query, key, value, attention_mask, extra=None, **others):
        return attention_of(module, "sdpa")(module, query, key, value, attention_mask, **others)

    assert {"extra", "position_bias"} <= names_read(hands_on)


def test_weights_are_returned_if_eager_attention_is_asked_for_them():
    model, ids = llama(), tokens(2, 130)
    model.set_attn_implementation("eager")
    want = model(ids, output_attentions=True).attentions
    with applied(model, dx.Rule.of(dx.SlidingWindow(24))) as handle:
        got = model(ids, output_attentions=True).attentions
        assert all(map(torch.equal, got, want))
        logits(model, input_ids=ids)
        assert handle.stats()["dense_calls"] == {"attention weights": 3}
        assert handle.stats()["sparse_calls"] == 3
    model.config.output_attentions = True
    with applied(model) as handle:
        assert len(model(ids).attentions) == 3
        assert handle.stats()["dense_calls"] == {"attention weights": 3}


@pytest.mark.skipif(not COMPILERS_READ_NAMES, reason="torch.compile needs a plain name")
def test_weights_may_be_asked_for_after_apply(tmp_path):
    model, ids = llama(), tokens(2, 130)
    with applied(model), pytest.raises(ValueError, match="eager"):
        model.config.output_attentions = True  # SDPA returns none
    model.set_attn_implementation("eager")
    want = model(ids, output_attentions=True).attentions
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with applied(model, dx.Rule.of(dx.SlidingWindow(24))) as handle:
        sparse = logits(compiled, input_ids=ids)
        assert handle.stats()["sparse_calls"] == 3
        model.config.output_attentions = True
        assert all(map(torch.equal, model(ids).attentions, want))
        copy.deepcopy(model).save_pretrained(tmp_path)
        model.config.output_attentions = False
        close(logits(model, input_ids=ids), sparse)
        assert model(ids).attentions is None
        model.set_attn_implementation("eager")
        assert model.config._attn_implementation == "eager"
        model.set_attn_implementation("dynaxx")
    assert model.config._attn_implementation == "eager"


def test_a_policy_leaves_to_the_own_pattern_what_no_rule_serves():
    """Padding behind the virtual tokens of prompt tuning, and what it means without a policy."""
    model, ids = llama(), tokens(2, 130)
    mask = torch.ones_like(ids)
    mask[0, 10:50] = 0
    dense = logits(model, input_ids=ids, attention_mask=mask)[mask.bool()]
    with applied(model, dx.Rule.of(KEEP_ALL)) as handle:
        close(logits(model, input_ids=ids, attention_mask=mask)[mask.bool()], dense)
        assert handle.stats()["own_pattern_calls"] == 3


@pytest.mark.parametrize("padded", [False, True])
def test_images_are_blocks_over_windows(padded):
    """Tokens of an image see each other, in full layers and in the windows of local ones, as in Gemma 3 and 4."""
    made = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    make = getattr(made, "create_masks_for_vision_model", None)
    if make is None or "cache" not in inspect.signature(make).parameters:
        pytest.skip("this version of transformers makes these masks in another way")
    model, ids, kinds = gemma3(), tokens(2, 130), torch.zeros(2, 130, dtype=torch.int64)
    kinds[0, 10:60] = kinds[0, 70:75] = kinds[1, 60:125] = 1
    mask = torch.ones_like(ids)
    mask[1, : 20 * padded] = 0

    @torch.no_grad()
    def hidden():
        embedded, blocks = model.model.embed_tokens(ids), made.get_block_sequence_ids_for_mask(kinds)
        masks = made.create_masks_for_vision_model(
            config=model.config, inputs_embeds=embedded, attention_mask=mask, cache=None, position_ids=None,
            block_sequence_ids=blocks,
        )  # fmt: skip
        found = model.model(inputs_embeds=embedded, attention_mask=masks, use_cache=False).last_hidden_state
        return found[mask.bool()]

    dense = hidden()
    for rules in ((), (dx.Rule.of(dx.SlidingWindow(4096), layers=[1]),)):
        with applied(model, *rules) as handle:
            close(hidden(), dense)
            assert handle.stats()["own_pattern_calls"] == 3
