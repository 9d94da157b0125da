# SPDX-License-Identifier: Apache-2.0
"""A pass that is certain to be dense goes straight to the model's original attention, with equal results and counts."""

import threading
import time

import pytest
import torch
from small_models import INPUTS, SPARSE, close, gemma3, llama, logits, policy_for, tokens

import dynaxx as dx
from dynaxx.integrations.transformers import passes
from dynaxx.integrations.transformers.calls import border
from dynaxx.integrations.transformers.calls import layer as layers
from dynaxx.integrations.transformers.calls.arguments import Signature
from dynaxx.integrations.transformers.passes import Passes

transformers = pytest.importorskip("transformers")


@pytest.fixture
def planned(monkeypatch):
    """List the layers whose calls are planned instead of going straight to the original attention."""
    found, plan_call = [], layers.plan_call

    def watched(current, index, *given):
        found.append(index)
        return plan_call(current, index, *given)

    monkeypatch.setattr(layers, "plan_call", watched)
    return found


@pytest.mark.parametrize("make", [llama, gemma3])
@pytest.mark.parametrize("inputs", INPUTS)
def test_results_and_counts_are_those_of_planned_calls(make, inputs, planned, monkeypatch):
    model = make()
    arguments, _ = inputs(model)
    dense = logits(model, **arguments)
    rules = (dx.Rule.of(SPARSE),) if make is llama else (dx.Rule.of(SPARSE, layers=[1]),)
    with dx.apply(model, policy_for(model, *rules, dense_below=200)) as handle:
        for _ in range(4):
            assert torch.equal(logits(model, **arguments), dense)
        straight = handle.stats()
        assert len(planned) == (1 if make is llama else 2)  # one call per kind of layer
        monkeypatch.setattr(passes, "_dense_pass", lambda *given: (False, None))
        handle.reset_stats()
        for _ in range(4):
            assert torch.equal(logits(model, **arguments), dense)
        assert handle.stats() == straight
        assert sum(straight["dense_calls"].values()) == 12


def test_a_known_dense_pass_asks_for_nothing(planned, monkeypatch):
    """From the third pass on, calls are not looked up; masks, lengths and the kill switch still count."""
    model, ids = llama(), tokens(2, 60)
    padding = torch.ones(2, 60, dtype=torch.int64)
    padding[1, :20] = 0
    dense, padded = logits(model, input_ids=ids), logits(model, input_ids=ids, attention_mask=padding)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE), dense_below=200)) as handle:
        for _ in range(2):
            logits(model, input_ids=ids)
        monkeypatch.setattr(Signature, "of", lambda *given: pytest.fail("looked up"))
        assert torch.equal(logits(model, input_ids=ids), dense)
        assert torch.equal(logits(model, input_ids=ids, attention_mask=padding), padded)
        assert handle.stats()["dense_calls"] == {"below dense_below": 12}
        monkeypatch.undo()
        handle.kill_switch.engage()
        assert torch.equal(logits(model, input_ids=ids), dense)
        assert handle.stats()["dense_calls"] == {"below dense_below": 12, "kill switch": 3}
        handle.kill_switch.release()
        long = tokens(2, 220)
        logits(model, input_ids=long)
        assert handle.stats()["sparse_calls"] == 3
        with pytest.raises(IndexError):  # a failing pass leaves no trace
            logits(model, input_ids=ids + 10**6)
        logits(model, input_ids=long)
        assert handle.stats()["sparse_calls"] == 6


def test_steps_without_a_decode_rule_are_dense(planned):
    model = llama()
    wanted = model.generate(tokens(1, 40), max_new_tokens=6, do_sample=False)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE), dense_below=100)) as handle:
        assert torch.equal(model.generate(tokens(1, 40), max_new_tokens=6, do_sample=False), wanted)
        assert planned == [0, 0]  # of the prompt and of the first step
        assert handle.stats()["dense_calls"] == {"below dense_below": 3, "decode": 15}


def test_short_prompts_without_a_policy_are_dense(planned):
    model, ids = gemma3(), tokens(1, 60)
    dense = logits(model, input_ids=ids)
    with dx.apply(model) as handle:
        assert torch.equal(logits(model, input_ids=ids), dense)
        assert planned == [0, 1]
        assert handle.stats()["dense_calls"] == {"too few queries to gain": 3}


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
    from dynaxx.integrations.transformers.calls.border import causal_kind, wins

    q, k = (torch.Size((1, heads, 1, head_dim)) for heads in (q_heads, kv_heads))
    assert wins("cuda", causal_kind(q, k), border)
    assert not wins("cuda", causal_kind(q, k), border - 1)
    assert wins("cpu", causal_kind(q, k), 256)


def test_passes_of_a_known_shape_need_no_context(monkeypatch):
    model, ids = llama(), tokens(2, 60)
    dense = logits(model, input_ids=ids)
    begun, start = [], Passes.start_pass
    monkeypatch.setattr(Passes, "start_pass", lambda self, given: begun.append(1) or start(self, given))
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE), dense_below=200)) as handle:
        handle.counts.probe.spacing = 1e9

        def starts(passes=1, **given):
            """Return how many of the passes had a context."""
            begun.clear()
            for _ in range(passes):
                assert torch.equal(logits(model, **{"input_ids": ids, **given}), dense)
            return len(begun)

        handle.counts.probe._last_request = time.monotonic()
        before = handle.counts.numbers.value("dynaxx_requests_total", route="dense")
        assert starts(6) == 3  # the first sets the state of the border, the second is planned, the third is known
        assert handle.counts.numbers.value("dynaxx_requests_total", route="dense") == before + 6
        assert handle.stats()["dense_calls"] == {"below dense_below": 18}
        cache = model(ids, use_cache=True).past_key_values
        assert handle.passes.requests.get(cache) is not None
        assert starts(past_key_values=transformers.DynamicCache()) == 1
        with handle.request("one"):
            assert starts() == 1
        handle.kill_switch.engage()
        assert starts(2) == 2
        handle.kill_switch.release()
        assert starts(2) == 1  # notes that the switch was released
        handle.counts.probe.spacing = 0.0
        assert starts(2) == 2  # timed
        handle.counts.probe.spacing = 1e9
        handle.replace(policy_for(model, dx.Rule.of(SPARSE), dense_below=190))
        assert starts(4) == 3
        assert sum(handle.stats()["dense_calls"].values()) == 3 * (6 + 1 + 1 + 1 + 2 + 2 + 2 + 4)
        begun.clear()
        with torch.enable_grad():
            model(ids)
        assert begun
        with pytest.raises(IndexError):
            logits(model, input_ids=ids + 10**6)
        logits(model, input_ids=tokens(2, 220))  # a failing pass leaves no trace
        assert handle.stats()["sparse_calls"] == 3
        threads = [threading.Thread(target=starts, args=(5,)) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert torch.equal(logits(model, input_ids=ids), dense)


def test_a_replaced_attention_is_noticed_in_passes_of_a_known_shape(caplog):
    model, ids = llama(), tokens(1, 60)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE), dense_below=200)) as handle:
        handle.counts.probe.spacing = 1e9
        handle.counts.probe._last_request = time.monotonic()
        for _ in range(3):
            logits(model, input_ids=ids)
        model.set_attn_implementation("sdpa")
        logits(model, input_ids=ids)
        assert "nothing runs on dynaxx" in caplog.text
        assert handle.stats()["dense_calls"] == {"below dense_below": 9}


def test_equal_dense_calls_of_an_uncertain_pass_are_planned_once(planned, monkeypatch):
    """A pass whose length is beyond the border of masked calls alone is not certain to be dense."""
    monkeypatch.setitem(border.BORDERS, "cpu", {"causal": 1000, "masked": 64, "eager": 64})
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
