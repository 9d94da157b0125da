# SPDX-License-Identifier: Apache-2.0
"""Decoding under a policy in transformers: generate's tokens compared with dense attention and with the definition."""

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts

transformers = pytest.importorskip("transformers")

PROMPT = 74
NEW = 8


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.6,  # attention that is not flat
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def policy_of(model, rule, *, layers="all", page_size=16, prefill=None, **fields):
    rules = [dx.Rule.of(rule, layers=layers, phase="decode", block_size=page_size)]
    if prefill is not None:
        rules.append(dx.Rule.of(prefill))
    return dx.Policy(model=model_facts(model), block_size=16, rules=tuple(rules), **fields)


def prompts(batch=1, length=PROMPT, seed=1):
    return torch.randint(3, 320, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **kwargs):
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(ids, **kwargs)


CASES = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 40},
    "beam search": {"num_beams": 2},
    "sampling": {"do_sample": True, "temperature": 0.7},
    "a tokenizer, as transformers' server passes": {"tokenizer": object()},
}


@pytest.mark.parametrize("case", CASES)
def test_density_one_gives_the_tokens_of_dense(model, case):
    ids = prompts(2)
    torch.manual_seed(5)
    dense = generate(model, ids, **CASES[case])
    with dx.apply(model, policy_of(model, dx.TopK(1.0, dx.MinMax()))) as handle:
        torch.manual_seed(5)
        assert torch.equal(generate(model, ids, **CASES[case]), dense)
        assert handle.stats()["sparse_calls"] >= 2 * (NEW - 1)
    assert torch.equal(generate(model, ids), generate(model, ids))


@pytest.mark.parametrize("rule", [
    dx.Sink(4) | dx.SlidingWindow(32) | dx.TopK(0.25, dx.MinMax()),
    dx.SlidingWindow(16) | dx.TopK(2, dx.MeanPool()),
    dx.Sink(4) | dx.SlidingWindow(40),
], ids=["share", "count", "static"])  # fmt: skip
@pytest.mark.parametrize("case", ["dynamic cache", "static cache", "beam search"])
def test_lower_budgets_give_the_tokens_of_the_definition(model, case, rule, monkeypatch):
    """Compare with the definition: new summaries in every step, and the reference backend."""
    from dynaxx.integrations.transformers.calls import decode

    ids = prompts(2)
    with dx.apply(model, policy_of(model, rule)) as handle:
        torch.manual_seed(5)
        tokens = generate(model, ids, **CASES[case])
        assert handle.stats()["sparse_calls"] >= 2 * (NEW - 1)
        afresh = lambda self, layer, keys, cache, bound, **place: dx.summarize_pages(
            cache, bound=bound, backend="reference"
        )
        by_definition = lambda *args, **kwargs: dx.sparse_decode(*args, **kwargs, backend="reference")
        monkeypatch.setattr(decode.CacheMemory, "with_summaries", afresh)
        monkeypatch.setattr(decode, "sparse_decode", by_definition)
        torch.manual_seed(5)
        assert torch.equal(generate(model, ids, **CASES[case]), tokens)


def test_several_tokens_a_step(model, monkeypatch):
    """Prompt lookup guesses tokens that one step checks. At full density the tokens are those of dense attention,
    below it those of the definition.
    """
    from dynaxx.integrations.transformers.calls import decode

    ids, steps = prompts(1, 40).repeat(1, 3), []
    guess = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 24}

    def seen(q, cache, budget, **kwargs):
        steps.append(q.shape[1])
        return dx.sparse_decode(q, cache, budget, **kwargs)

    monkeypatch.setattr(decode, "sparse_decode", seen)
    with dx.apply(model, policy_of(model, dx.TopK(1.0, dx.MinMax()))):
        assert torch.equal(generate(model, ids, **guess), generate(model, ids, max_new_tokens=24))
    assert max(steps) > 1, "no step had several queries"
    rule = dx.Sink(4) | dx.SlidingWindow(16) | dx.TopK(0.3, dx.MinMax())
    with dx.apply(model, policy_of(model, rule)):
        tokens = generate(model, ids, **guess)
        by_definition = lambda *args, **kwargs: dx.sparse_decode(*args, **kwargs, backend="reference")
        monkeypatch.setattr(decode, "sparse_decode", by_definition)
        assert torch.equal(generate(model, ids, **guess), tokens)


def test_it_is_not_dense(model):
    ids = prompts(1, 300)
    with dx.apply(model, policy_of(model, dx.SlidingWindow(1) | dx.TopK(0))):
        sparse = generate(model, ids)
    assert not torch.equal(sparse, generate(model, ids))


def test_left_padding(model):
    """A padded prompt in a batch generates the same tokens as alone."""
    short, long = prompts(1, 61, seed=2), prompts(1, 100, seed=3)
    batch = torch.cat([torch.cat([torch.zeros(1, 39, dtype=torch.int64), short], 1), long])
    mask = (torch.arange(100) >= torch.tensor([[39], [0]])).long()
    dense = generate(model, batch, attention_mask=mask)
    with dx.apply(model, policy_of(model, dx.TopK(1.0))) as handle:
        assert torch.equal(generate(model, batch, attention_mask=mask), dense)
        assert not handle.stats()["dense_calls"].keys() - {"no rule"}
    rule = dx.Sink(4) | dx.SlidingWindow(24) | dx.TopK(0.3, dx.MinMax())
    with dx.apply(model, policy_of(model, rule)) as handle:
        padded = generate(model, batch, attention_mask=mask)
        assert torch.equal(padded[1:, 100:], generate(model, long)[:, 100:])  # no padding: the same pages
        assert handle.stats()["sparse_calls"] >= 4 * (NEW - 1)


def test_right_padding_is_dense_and_said(model):
    batch = prompts(2, 60)
    mask = (torch.arange(60) < torch.tensor([[60], [41]])).long()
    dense = generate(model, batch, attention_mask=mask)
    with dx.apply(model, policy_of(model, dx.TopK(0.3, dx.MinMax()))) as handle:
        assert torch.equal(generate(model, batch, attention_mask=mask), dense)
        assert handle.stats()["dense_calls"]["mask is not causal sequences"] == 2 * (NEW - 1)


def test_prefill_and_decode_follow_their_own_rules(model):
    ids = prompts(1, 128)
    policy = policy_of(model, dx.TopK(0.3, dx.MinMax()), prefill=dx.SlidingWindow(32))
    with dx.apply(model, policy) as handle:
        generate(model, ids)
        assert handle.stats() == {
            "sparse_calls": 2 * NEW,
            "own_pattern_calls": 0,
            "dense_calls": {},
            "dense_sequences": {},
        }


def test_the_guard_says_that_it_does_not_look_at_steps(model, telemetry):
    policy = policy_of(model, dx.TopK(0.3, dx.MinMax()), prefill=dx.SlidingWindow(32)).replace(guard={"sample": 1.0})
    with dx.apply(model, policy) as handle:
        generate(model, prompts(1, 128))
        handle.wait()
    assert telemetry.value("dynaxx_guard_checks_total", verdict="ok") == 2
    assert telemetry.value("dynaxx_guard_checks_total", verdict="decode") == 2 * (NEW - 1)


def test_the_length_border_the_kill_switch_and_layers(model):
    ids = prompts(1, 70)
    with dx.apply(model, policy_of(model, dx.TopK(0.3, dx.MinMax()), dense_below=74)) as handle:
        generate(model, ids)
        assert handle.stats()["dense_calls"]["below dense_below"] == 2 * 3  # 71 to 73 keys
        assert handle.stats()["sparse_calls"] == 2 * (NEW - 1 - 3)
    with dx.apply(model, policy_of(model, dx.TopK(0.3, dx.MinMax()), layers=(1,))) as handle:
        generate(model, ids)
        assert handle.stats()["dense_calls"]["no rule"] == NEW + 1  # layer 0, and the prefill of layer 1
        handle.reset_stats()
        handle.kill_switch.engage("test")
        generate(model, ids)
        assert handle.stats()["sparse_calls"] == 0


def test_summaries_survive_only_what_they_describe(model):
    """Assisted decoding crops the cache, and a reset static cache starts another request."""
    rule = dx.SlidingWindow(16) | dx.TopK(1, dx.MinMax())
    ids = prompts(1, 80)
    with dx.apply(model, policy_of(model, rule)) as handle:
        wanted = generate(model, ids)
        cache = transformers.StaticCache(config=model.config, max_cache_len=160)
        for seed in (1, 4, 1):
            cache.reset()
            again = generate(model, prompts(1, 80, seed=seed), past_key_values=cache)
        assert torch.equal(again, wanted)
        handle.reset_stats()
        cropped = transformers.DynamicCache()
        with torch.no_grad():
            model(ids, past_key_values=cropped)
            steps = [model(wanted[:, 80 + i : 81 + i], past_key_values=cropped).logits for i in range(6)]
            cropped.crop(-4)
            again = [model(wanted[:, 80 + i : 81 + i], past_key_values=cropped).logits for i in range(2, 6)]
        torch.testing.assert_close(torch.cat(again), torch.cat(steps[2:]))


def test_per_head_budgets_and_uncovered_heads(model):
    covered = dx.Rule.of(dx.TopK((0.1, 0.2, 0.3), dx.MinMax()), heads=(0, 1, 2), phase="decode", block_size=16)
    from dynaxx.policy.resolve import resolve_decode

    plans = resolve_decode(dx.Policy(model=model_facts(model), rules=(covered,)))
    assert plans[0].budget == dx.PageBudget((0.3, 1.0))
    assert plans[0].page_size == 16
    with dx.apply(model, dx.Policy(model=model_facts(model), rules=(covered,))):
        generate(model, prompts(1, 70))


def test_decode_rules_that_a_policy_refuses(model):
    facts = model_facts(model)
    with pytest.raises(ValueError, match="decoding supports"):
        dx.Rule.of(dx.Strided(8), phase="decode")
    twice = tuple(dx.Rule.of(dx.TopK(0.1), phase="decode") for _ in range(2))
    with pytest.raises(dx.PolicyError, match="both cover"):
        dx.Policy(model=facts, rules=twice)
    mixed = (dx.Rule.of(dx.TopK(0.1, dx.MinMax()), heads=(0,), phase="decode"),
             dx.Rule.of(dx.TopK(0.1, dx.MeanPool()), heads=(1,), phase="decode"))  # fmt: skip
    with pytest.raises(dx.PolicyError, match="score pages in one way"):
        dx.apply(model, dx.Policy(model=facts, rules=mixed))
