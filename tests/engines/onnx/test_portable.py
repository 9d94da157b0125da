# SPDX-License-Identifier: Apache-2.0
"""Attention in plain operations gives the results of the kernels, for every static rule, length and head grouping."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import dynaxx as dx
from dynaxx.engines.portable import PortableModel, portable_refusals
from dynaxx.engines.portable.attention import gathered_attention
from dynaxx.engines.portable.rules import GatherRule
from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.integrations.transformers import model_facts
from dynaxx.policy import Policy, Rule
from tiny import llama, tokens

STATIC = (
    dx.SlidingWindow(1),
    dx.SlidingWindow(100),
    dx.SlidingWindow((37, 0)) | dx.Sink(5),
    dx.SlidingWindow(256) | dx.Sink(64) | dx.GlobalTokens((3, 200)),
    dx.LocalBlocks(3),
    dx.LocalBlocks(2) | dx.Sink(70),
    dx.Dilated(16, 4),
    dx.GlobalTokens((5,)),
    dx.GlobalTokens(10, symmetric=True) | dx.SlidingWindow(30),
    dx.GlobalTokens((3, 77, 150), symmetric=True) | dx.SlidingWindow((3, 9)),
)
LENGTHS = ((1, 1), (63, 63), (129, 129), (300, 300), (1, 300), (65, 300))


@pytest.mark.parametrize("pattern", STATIC, ids=repr)
@pytest.mark.parametrize("causal", [True, False])
def test_gathering_computes_what_the_layout_shows(pattern, causal):
    torch.manual_seed(0)
    rule = GatherRule.of(pattern, (64, 64), causal=causal)
    for seqlen_q, seqlen_k in LENGTHS:
        if not causal and seqlen_q != seqlen_k:
            continue
        q = torch.randn(2, seqlen_q, 6, 16)
        k, v = torch.randn(2, seqlen_k, 2, 16), torch.randn(2, seqlen_k, 2, 24)
        layout = pattern.layout(seqlen_q, seqlen_k, causal=causal, block_size=64)
        found = gathered_attention(*(x.transpose(1, 2) for x in (q, k, v)), rule, scale=0.25)
        torch.testing.assert_close(found, dx.sparse_attention(q, k, v, layout, scale=0.25), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (dx.Strided(64), "more keys in a longer sequence"),
        (dx.RandomBlocks(2), "more keys in a longer sequence"),
        (dx.Full(), "more keys in a longer sequence"),
        (dx.SlidingWindow((-1, 0)), "more keys in a longer sequence"),
        (dx.LastQueries(5), "depends on the length"),
        (dx.Documents((0, 5, 10)), "for one length only"),
    ],
    ids=repr,
)
def test_rules_that_grow_with_the_length_are_refused(pattern, reason):
    with pytest.raises(ValueError, match=reason):
        GatherRule.of(pattern, (64, 64), causal=True)


def mixed_policy(model):
    window = dx.SlidingWindow(100) | dx.Sink(5)
    rules = [Rule.of(window, layers=[0]), Rule.of(window, layers=[1], heads=[0, 2, 3])]
    return Policy(model=model_facts(model), rules=[*rules, Rule.of(dx.LocalBlocks(2), layers=[1], heads=[1])])


@torch.no_grad()
def test_a_decoder_equals_apply_and_leaves_the_model_as_it_was():
    model, ids = llama(), tokens(2, 333)
    before, policy = model(ids).logits, mixed_policy(model)
    found = PortableModel(model, policy, last_logits=False)
    logits = found(ids, found.empty_cache(2))[0]
    torch.testing.assert_close(model(ids).logits, before)
    with dx.apply(model, policy):
        torch.testing.assert_close(logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    assert (logits - before).abs().max() > 0.01
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_a_prompt_in_chunks_equals_a_prompt():
    model, ids = llama(), tokens(1, 200)
    policy = Policy(model=model_facts(model), rules=[Rule.of(dx.SlidingWindow(60) | dx.Sink(4))])
    found = PortableModel(model, policy, last_logits=False)
    whole = found(ids, found.empty_cache())[0]
    _, *cache = found(ids[:, :77], found.empty_cache())
    torch.testing.assert_close(found(ids[:, 77:], cache)[0], whole[:, 77:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_windows_of_a_model_and_of_an_encoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = MistralConfig(**sizes, num_key_value_heads=2, vocab_size=64, sliding_window=50)
    model, ids = MistralForCausalLM(config).eval(), tokens(2, 200)
    found = PortableModel(model)
    torch.testing.assert_close(found(ids, found.empty_cache(2))[0], model(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)

    bert = BertModel(BertConfig(**sizes, vocab_size=64)).eval()
    mask = torch.ones_like(ids)
    mask[1, 150:] = 0
    out = PortableModel(bert, window=(20, 30))(ids, [mask])
    with dx.apply(bert, window=(20, 30)):
        want = bert(ids, attention_mask=mask)[0]
    torch.testing.assert_close(out[mask.bool()], want[mask.bool()], atol=1e-4, rtol=1e-4)


def test_encoders_whose_modules_have_no_layer_number():
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=64, dim=48, hidden_dim=64, n_layers=2, n_heads=6, initializer_range=0.2)
    model, ids = DistilBertModel(config).eval(), tokens(2, 100)
    portable, mask = PortableModel(model, window=(20, 30)), torch.ones(2, 100)
    with torch.no_grad(), dx.apply(model, window=(20, 30)):
        want = model(ids).last_hidden_state
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(portable(ids, [mask]), want, atol=1e-5, rtol=1e-5)


def test_rules_that_plain_operations_cannot_express_are_refused_with_the_fix():
    model = llama()
    facts = model_facts(model)
    dynamic = Policy(model=facts, rules=[Rule.of(dx.Sink(4) | dx.TopK(0.5))])
    with pytest.raises(UnsupportedInputError, match="looks at the data; export with form='custom'"):
        PortableModel(model, dynamic)
    assert portable_refusals(model, dynamic)
    assert not portable_refusals(model, mixed_policy(model))
    decode = Policy(model=facts, rules=[Rule.of(dx.Sink(64) | dx.SlidingWindow(256), phase="decode")])
    with pytest.raises(UnsupportedInputError, match="decode rules"):
        PortableModel(model, decode)
    with pytest.raises(UnsupportedInputError, match="`window` is for encoders"):
        PortableModel(model, window=8)
    experts = MixtralConfig(vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=1,
                            num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)  # fmt: skip
    with pytest.raises(UnsupportedInputError, match=r"mixture of experts .*: serve the model with"):
        PortableModel(MixtralForCausalLM(experts).eval())
    other = Policy(model=facts.model_copy(update={"layers": 3}), rules=[])
    with pytest.raises(PolicyError, match="is for another model"):
        PortableModel(model, other)
