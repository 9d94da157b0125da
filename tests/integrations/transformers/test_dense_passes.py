# SPDX-License-Identifier: Apache-2.0
"""Dense calls are planned once per pass and kind of layer, with results and counts as if each was planned."""

import pytest
import torch
from small_models import INPUTS, SPARSE, close, gemma3, llama, logits, policy_for, tokens

import dynaxx as dx
from dynaxx.integrations.transformers.calls import layer as layers
from dynaxx.integrations.transformers.calls import own_planning

transformers = pytest.importorskip("transformers")


@pytest.fixture
def planned(monkeypatch):
    """List the layers whose calls are planned."""
    found, plan_call = [], layers.plan_call

    def watched(current, index, *given):
        found.append(index)
        return plan_call(current, index, *given)

    monkeypatch.setattr(layers, "plan_call", watched)
    return found


@pytest.mark.parametrize("make", [llama, gemma3])
@pytest.mark.parametrize("inputs", INPUTS)
def test_dense_calls_are_planned_once_per_kind(make, inputs, planned):
    model = make()
    arguments, _ = inputs(model)
    dense = logits(model, **arguments)
    rules = (dx.Rule.of(SPARSE),) if make is llama else (dx.Rule.of(SPARSE, layers=[1]),)
    with dx.apply(model, policy_for(model, *rules, dense_below=200)) as handle:
        for _ in range(4):
            assert torch.equal(logits(model, **arguments), dense)
        assert len(planned) == 4 * (1 if make is llama else 2)  # once per pass and kind of layer
        assert sum(handle.stats()["dense_calls"].values()) == 12


def test_steps_without_a_decode_rule_are_dense(planned):
    model = llama()
    wanted = model.generate(tokens(1, 40), max_new_tokens=6, do_sample=False)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE), dense_below=100)) as handle:
        assert torch.equal(model.generate(tokens(1, 40), max_new_tokens=6, do_sample=False), wanted)
        assert planned == [0] * 6  # of the prompt and of each step
        assert handle.stats()["dense_calls"] == {"below dense_below": 3, "decode": 15}


def test_short_prompts_without_a_policy_are_dense(planned):
    model, ids = gemma3(), tokens(1, 60)
    dense = logits(model, input_ids=ids)
    with dx.apply(model) as handle:
        assert torch.equal(logits(model, input_ids=ids), dense)
        assert planned == [0, 1]
        assert handle.stats()["dense_calls"] == {"too few queries to gain": 3}


@pytest.mark.parametrize("rule", [None, dx.SlidingWindow(16)])
@torch.no_grad()
def test_a_tree_of_drafted_tokens_is_verified_exactly(rule):
    """Speculative decoding passes a 4D mask, in which each drafted token sees its ancestors."""
    model, ids, parents = llama(), tokens(1, 85), (-1, 0, 0, 1, 2)
    shown = torch.zeros(1, 1, 5, 85, dtype=torch.bool)
    shown[..., :80] = True
    for token in range(5):
        ancestor = token
        while ancestor >= 0:
            shown[0, 0, token, 80 + ancestor], ancestor = True, parents[ancestor]
    positions = torch.tensor([[80, 81, 81, 82, 82]])

    def verify():
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :80], past_key_values=cache)
        return model(ids[:, 80:], past_key_values=cache, attention_mask=shown, position_ids=positions).logits

    whole = logits(model, input_ids=ids[:, :80])
    policy = None if rule is None else policy_for(model, dx.Rule.of(rule), dense_below=81)
    wanted = verify()
    with dx.apply(model, policy) as handle:
        close(logits(model, input_ids=ids[:, :80]), whole)
        close(verify(), wanted)
        assert rule is None or handle.stats()["dense_calls"]["mask is not causal sequences"] == 3


@torch.no_grad()
def test_a_prefix_is_shared_exactly():
    model, ids = llama(), tokens(1, 80)

    def step():
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        return model(torch.tensor([[3], [9], [5]]), past_key_values=cache).logits

    wanted = step()
    with dx.apply(model):
        close(step(), wanted)


@pytest.mark.parametrize("rule", [None, dx.SlidingWindow(16)])
def test_forward_mode_derivatives_are_those_of_the_models_attention(rule, monkeypatch):
    """A kernel's refusal counted as a failure, which made the layer rest."""
    monkeypatch.setitem(own_planning.BORDERS, "cpu", dict.fromkeys(("causal", "masked", "eager"), 32))
    model, ids = llama(), tokens(1, 40)
    model.set_attn_implementation("eager")
    start = model.model.embed_tokens(ids).detach()
    run = lambda x: model(inputs_embeds=x, use_cache=False).logits
    derive = lambda: torch.func.jvp(run, (start,), (torch.ones_like(start),))
    wanted = derive()
    policy = None if rule is None else policy_for(model, dx.Rule.of(rule))
    with dx.apply(model, policy) as handle:
        for found, each in zip(derive(), wanted, strict=True):
            close(found, each)
        assert handle.stats()["dense_calls"] == {"forward-mode derivatives": 3}


def test_the_kill_switch_makes_a_pass_dense(planned):
    model, ids = llama(), tokens(1, 100)
    dense = logits(model, input_ids=ids)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))) as handle:
        handle.kill_switch.engage()
        assert torch.equal(logits(model, input_ids=ids), dense)
        assert planned == [0]
        assert handle.stats()["dense_calls"] == {"kill switch": 3}
        handle.kill_switch.release()
        logits(model, input_ids=ids)
        assert handle.stats()["sparse_calls"] == 3


def test_a_length_beyond_the_rollout_may_have_shorter_rows():
    model = llama()
    ids, mask = tokens(2, 100), torch.ones(2, 100, dtype=torch.int64)
    mask[1, :40] = 0  # only the second row is within the rollout
    policy = policy_for(model, dx.Rule.of(SPARSE), rollout=dx.policy.Rollout(max_tokens=80))
    with dx.apply(model, policy) as handle:
        logits(model, input_ids=ids, attention_mask=mask)
        assert handle.stats()["sparse_calls"] == 3


def test_between_the_borders_the_previous_prompt_decides(planned):
    model, long, middle = llama(), tokens(1, 220), tokens(1, 150)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE), dense_below=100, sparse_from=200)) as handle:
        for ids, sparse in ((middle, 0), (long, 3), (middle, 6), (tokens(1, 90), 6), (middle, 6)):
            logits(model, input_ids=ids)
            assert handle.stats()["sparse_calls"] == sparse


def test_recomputed_layers_are_counted(planned):
    model, ids = llama().train(), tokens(1, 60)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    model(input_ids=ids, labels=ids).loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE), dense_below=200)) as handle:
        for i in range(1, 5):
            model(input_ids=ids, labels=ids).loss.backward()
            assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), wanted, strict=True))
            assert handle.stats()["dense_calls"] == {"below dense_below": 6 * i}
            model.zero_grad()


def test_scores_that_sdpa_drops_are_planned(planned):
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_logit_softcapping=2.0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval(), tokens(1, 60)
    dense = logits(model, input_ids=ids)
    with dx.apply(model):
        torch.testing.assert_close(logits(model, input_ids=ids), dense)
    assert planned == [0, 1]


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "border"),
    [(32, 8, 128, 16384), (32, 32, 128, 32768), (16, 8, 256, 32768), (16, 2, 512, 2048)],
)
def test_full_causal_layers_of_a_gpu_are_served_from_their_border_on(q_heads, kv_heads, head_dim, border):
    from dynaxx.integrations.transformers.calls.own_planning import border as border_of
    from dynaxx.integrations.transformers.calls.own_planning import causal_kind

    q, k = (torch.Size((1, heads, 1, head_dim)) for heads in (q_heads, kv_heads))
    assert border_of("cuda", causal_kind(q, k)) == border
    assert border_of("cpu", causal_kind(q, k)) == 256


def test_equal_dense_calls_of_an_uncertain_pass_are_planned_once(planned, monkeypatch):
    """A pass whose length is beyond the border of masked calls alone is not certain to be dense."""
    monkeypatch.setitem(own_planning.BORDERS, "cpu", {"causal": 1000, "masked": 64, "eager": 64})
    model, ids = llama(), tokens(2, 100)
    padding = torch.ones(2, 100, dtype=torch.int64)
    padding[1, :20] = 0
    dense, padded = logits(model, input_ids=ids), logits(model, input_ids=ids, attention_mask=padding)
    with dx.apply(model) as handle:
        for passes in (1, 2):
            assert torch.equal(logits(model, input_ids=ids), dense)
            assert planned == [0] * passes
            assert handle.stats()["dense_calls"] == {"too few queries to gain": 3 * passes}
        close(logits(model, input_ids=ids, attention_mask=padding)[padding.bool()], padded[padding.bool()])
        assert handle.stats()["own_pattern_calls"] == 3
