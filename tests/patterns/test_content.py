# SPDX-License-Identifier: Apache-2.0
"""Global tokens by content: matching, resolution per request, and the keys that a layer then sees, also in a model."""

import importlib.util

import pytest
import torch

import dynaxx as dx
from dynaxx.patterns import content_tokens
from dynaxx.policy import ModelFacts, resolve, to_spec
from dynaxx.testing import make_qkv

HEADING = (7, 8, 9)


def by_hand(ids, token_ids, sequences, span):
    found = set()
    for sequence in [*((token,) for token in token_ids), *sequences]:
        for start in range(len(ids) - len(sequence) + 1):
            if tuple(ids[start : start + len(sequence)]) == tuple(sequence):
                found |= set(range(start, min(len(ids), start + len(sequence) + span)))
    return tuple(sorted(found))


@pytest.mark.parametrize("seed", range(40))
def test_matches_against_a_search_by_hand(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=generator)
    ids = draw(4, int(draw(80, 1))).tolist()
    token_ids = tuple(draw(6, int(draw(3, 1))).tolist())
    sequences = tuple(tuple(draw(4, int(draw(4, 1)) + 1).tolist()) for _ in range(int(draw(3, 1))))
    if not token_ids and not sequences:
        token_ids = (2,)
    span = int(draw(6, 1))
    pattern = dx.GlobalContent(token_ids, sequences, span=span)
    want = dx.GlobalTokens(by_hand(ids, token_ids, sequences, span))
    assert pattern.resolve(ids) == want
    assert pattern.resolve(torch.tensor(ids, dtype=torch.int64)[None]) == want
    assert pattern.resolve(torch.tensor(ids, dtype=torch.int32)) == want


def test_whole_rules_resolve():
    content = dx.GlobalContent((5,), span=1, symmetric=True)
    found = dx.GlobalTokens((2, 3), symmetric=True)
    ids = [1, 1, 5, 1, 1]
    assert (dx.Sink(1) | content).resolve(ids) == dx.Sink(1) | found
    assert ((dx.Sink(1) | content) & dx.Causal()).resolve(ids) == (dx.Sink(1) | found) & dx.Causal()
    assert (content | dx.TopK(0.5)).resolve(ids) == found | dx.TopK(0.5)
    assert (content | dx.TopK(0.5)).needs_tokens
    plain = dx.SlidingWindow(4) | dx.Sink(1)
    assert plain.resolve(ids) is plain
    assert not plain.needs_tokens
    assert content.resolve([]) == dx.GlobalTokens((), symmetric=True)
    assert dx.GlobalContent((5, 2, 5)) == dx.GlobalContent((2, 5))
    assert hash(dx.GlobalContent(sequences=[[1, 2]])) == hash(dx.GlobalContent(sequences=((1, 2),)))


def test_wrong_use_is_refused_with_the_fix():
    content = dx.SlidingWindow(4) | dx.GlobalContent((5,))
    q, k, _ = make_qkv(1, 64, 64, 2, 2, 16)
    for use in (
        lambda: content.layout(64),
        lambda: dx.select_blocks(q, k, content),
        lambda: dx.select_blocks(q, k, content | dx.TopK(0.5)),
    ):
        with pytest.raises(ValueError, match=r"resolve\(input_ids\).*dynaxx.apply"):
            use()
    for arguments, message in (
        ({}, "got neither"),
        ({"token_ids": (-1,)}, r"`token_ids` must be >= 0, got \(-1,\)"),
        ({"sequences": ((),)}, "empty"),
        ({"sequences": ((1, -2),)}, r"`sequences` must be >= 0, got \(\(1, -2\),\)"),
        ({"token_ids": (1,), "span": -1}, "`span`"),
    ):
        with pytest.raises(ValueError, match=message):
            dx.GlobalContent(**arguments)
    for ids in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3)):
        with pytest.raises(ValueError, match="`input_ids` must be integers"):
            content.resolve(ids)


def test_policies_hold_it():
    rule = dx.SlidingWindow(64) | dx.GlobalContent((3,), (HEADING, (1, 2)), span=40) | dx.TopK(0.1)
    assert to_spec(rule).build() == rule
    facts = ModelFacts(model_type="llama", layers=2, q_heads=4, kv_heads=2, head_dim=16)
    policy = dx.Policy(model=facts, rules=(dx.Rule.of(rule, heads=[0, 1]), dx.Rule.of(dx.Sink(2), heads=[2])))
    plan = resolve(policy)[0]
    assert plan.needs_tokens
    ids = torch.tensor([0, 7, 8, 9, *range(20, 60)])
    found = plan.resolve(ids)
    assert not found.needs_tokens
    assert found == plan.resolve(ids)
    assert found.resolve(ids) is found
    want = resolve(policy.replace(rules=(dx.Rule.of(rule.resolve(ids), heads=[0, 1]), policy.rules[1])))[0]
    assert found == want
    with pytest.raises(dx.PolicyError, match="got neither"):
        dx.Policy(model=facts, rules=({"attention": {"kind": "global_content"}},))


def test_a_clause_on_the_last_page_reaches_its_definition():
    """The last query looks for the key of the definition. A window does not show it, a rule by content does."""
    seqlen, place = 1024, 40
    ids = torch.randint(20, 60, (seqlen,), generator=torch.Generator().manual_seed(0))
    ids[place - 5 : place - 2] = torch.tensor(HEADING)
    q, k, v = (torch.randn(1, seqlen, 1, 16, generator=torch.Generator().manual_seed(i)) * 0.3 for i in range(3))
    q[0, -1], k[0, place], v[0, place] = 0.0, 0.0, 0.0
    q[0, -1, 0, 0], k[0, place, 0, 0], v[0, place, 0, 3] = 10.0, 10.0, 100.0

    def last(pattern):
        return dx.sparse_attention(q, k, v, pattern.layout(seqlen, block_size=64))[0, -1, 0]

    dense = last(dx.Causal())
    window = dx.SlidingWindow(128)
    content = (window | dx.GlobalContent(sequences=(HEADING,), span=8)).resolve(ids)
    assert content.layout(seqlen, block_size=64).density() < 0.5
    assert dense[3] > 99
    assert last(window)[3].abs() < 1
    torch.testing.assert_close(last(content), dense, atol=1e-3, rtol=1e-4)
    missed = (window | dx.GlobalContent(sequences=(HEADING,))).resolve(ids)
    assert last(missed)[3].abs() < 1  # the heading alone: the definition stands two tokens after it


class WordTokenizer:
    """A tokenizer of words, in which a space belongs to the next word, as in byte-level tokenizers."""

    unk_token_id, unk_token = 0, "<unk>"
    words = ("<unk>", "DEF", " DEF", "INED", "\n", ":", ":\n", "a", " a", "b", " ", "(", "(DEF")

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        ids = []
        while text:
            word = max((word for word in self.words if text.startswith(word)), key=len, default=None)
            ids.append(0 if word is None else self.words.index(word))
            text = text[1 if word is None else len(word) :]
        return ids

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(self.words[i] for i in ids)


def test_texts_become_every_way_they_are_written():
    tokenizer = WordTokenizer()
    word = lambda *words: tuple(tokenizer.words.index(each) for each in words)
    assert set(content_tokens(tokenizer, ["DEFINED"])) == {
        word("DEF", "INED"), word(" DEF", "INED"), word("(DEF", "INED")
    }  # fmt: skip
    assert word("DEF", "INED", ":\n") in content_tokens(tokenizer, ["DEFINED:"])
    assert set(content_tokens(tokenizer, ["b", "DEFINED"])) > {word("b"), word("DEF", "INED")}
    for texts, error, message in (
        ([""], ValueError, "empty"),
        ([" "], ValueError, "empty"),
        (["xyz"], ValueError, "can represent, got 'xyz'"),
        ("DEFINED", TypeError, "put it in a list"),
    ):
        with pytest.raises(error, match=message):
            content_tokens(tokenizer, texts)


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
WINDOW = dx.SlidingWindow(20)
CONTENT = WINDOW | dx.GlobalContent((3,), (HEADING,), span=4)


def llama():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def policy_for(model, rule=CONTENT, **fields):
    from dynaxx.integrations.transformers.apply_policy import model_facts

    return dx.Policy(model=model_facts(model), rules=(dx.Rule.of(rule),), **{"block_size": 16, **fields})


def documents(*places, seqlen=200, seed=1):
    """Draw random tokens, one row per list of places, with a heading at each place."""
    ids = torch.randint(20, 64, (len(places), seqlen), generator=torch.Generator().manual_seed(seed))
    for row, own in zip(ids, places, strict=True):
        for place in own:
            row[place : place + 3] = torch.tensor(HEADING)
    return ids


@torch.no_grad()
def logits(model, **inputs):
    return model(**inputs).logits


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


def alone(model, rule, ids):
    """Return the result of a static policy made for exactly this sequence."""
    with dx.apply(model, policy_for(model, rule.resolve(ids))):
        return logits(model, input_ids=ids[None])[0]


@needs_transformers
@pytest.mark.parametrize("rule", [CONTENT, CONTENT | dx.TopK(0.1)], ids=["static", "hybrid"])
def test_every_row_of_a_batch_has_its_own_positions(rule):
    model, ids = llama(), documents((5, 90), (33,), ())
    with dx.apply(model, policy_for(model, rule)) as handle:
        got = logits(model, input_ids=ids)
        again = model.model(ids).last_hidden_state  # the decoder by itself, ids by position
        assert handle.stats() == {"sparse_calls": 6, "own_pattern_calls": 0, "dense_calls": {}, "dense_sequences": {}}
    for row in range(3):
        close(got[row], alone(model, rule, ids[row]))
    close(model.lm_head(again), got)
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks


@needs_transformers
def test_padding_and_packing():
    model, ids = llama(), documents((60, 150), (90,))
    mask = torch.ones(2, 200, dtype=torch.int64)
    mask[0, :50], mask[1, 170:] = 0, 0
    ids[0, 10:13] = torch.tensor(HEADING)  # within the padding: nothing may follow from it
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with dx.apply(model, policy_for(model)):
        got = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
        packed_ids = torch.cat([ids[0, 50:], ids[1, :170]])[None]
        packed_positions = torch.cat([torch.arange(150), torch.arange(170)])[None]
        packed = logits(model, input_ids=packed_ids, position_ids=packed_positions, use_cache=False)[0]
    first, second = alone(model, CONTENT, ids[0, 50:]), alone(model, CONTENT, ids[1, :170])
    close(got[0, 50:], first)
    close(got[1, :170], second)
    close(packed[:150], first)
    close(packed[150:], second)


@torch.no_grad()
def in_chunks(model, ids, sizes, cache=None):
    done, found = 0, []
    for size in sizes:
        out = model(ids[:, done : done + size], past_key_values=cache, use_cache=True)
        cache, done = out.past_key_values, done + size
        found.append(out.logits)
    return torch.cat(found, dim=1), cache


@needs_transformers
@pytest.mark.parametrize("given", [False, True])
def test_chunks_remember_the_tokens_before_them(given):
    """Chunks remember earlier tokens, even if a chunk ends within a heading, with a cache of the caller and of the
    model.
    """
    import transformers

    model, ids = llama(), documents((5, 79), (33,))
    with dx.apply(model, policy_for(model)) as handle:
        whole = logits(model, input_ids=ids)
        cache = transformers.DynamicCache(config=model.config) if given else None
        got, _ = in_chunks(model, ids, (80, 64, 56), cache)
        close(got, whole)
        assert handle.stats()["dense_calls"] == {}


@needs_transformers
def test_caches_that_are_cropped_reset_or_unknown():
    import transformers

    model, ids, other = llama(), documents((5, 90)), documents((60,), seed=2)
    cache = transformers.DynamicCache(config=model.config)
    with dx.apply(model, policy_for(model)) as handle, torch.no_grad():
        whole = logits(model, input_ids=ids)
        in_chunks(model, torch.cat([ids[:, :100], other[:, 50:]], 1), (100, 150), cache)
        cache.crop(-150)
        got, _ = in_chunks(model, ids[:, 100:], (60, 1, 39), cache)  # one token on its own: dense, and remembered
        close(got[:, :60], whole[:, 100:160])
        assert handle.stats()["dense_calls"] == {"decode": 3}
        assert len(handle.passes.tokens.caches) == 1
        handle.reset_stats()
        in_chunks(model, ids[:, 100:], (30,), cache)
        assert handle.stats()["dense_calls"] == {}

        fresh = transformers.DynamicCache(config=model.config)
        model(inputs_embeds=model.get_input_embeddings()(ids[:, :100]), past_key_values=fresh)
        model(ids[:, 100:], past_key_values=fresh)
        assert handle.stats()["dense_calls"] == {"no token ids": 3, "token ids of earlier chunks unknown": 3}
        del fresh
    with dx.apply(model, policy_for(model, CONTENT.parts[0])) as plain:
        logits(model, input_ids=ids)
        assert plain.passes.tokens is None


@needs_transformers
def test_rows_that_a_beam_search_may_have_permuted_are_not_trusted():
    model, ids = llama(), documents((5,), (33,))
    with dx.apply(model, policy_for(model)) as handle:
        in_chunks(model, ids, (100, 1, 99))
        assert handle.stats()["dense_calls"] == {"decode": 3, "token ids of earlier chunks unknown": 3}
        model.generate(ids, num_beams=2, max_new_tokens=3, do_sample=False, pad_token_id=0)


@needs_transformers
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("chunk", [None, 64])
def test_generate(cache, chunk):
    model, ids = llama(), documents((5, 90))
    arguments = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    arguments |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    arguments |= {"prefill_chunk_size": chunk} if chunk else {}
    with dx.apply(model, policy_for(model, CONTENT.resolve(ids))):
        want = torch.stack(model.generate(ids, **arguments).logits)
    with dx.apply(model, policy_for(model)) as handle:
        got = torch.stack(model.generate(ids, **arguments).logits)
        assert handle.stats()["sparse_calls"] == (12 if chunk else 3)  # the last chunk has fewer queries than a block
    close(got, want)


@needs_transformers
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_two_passes_at_once(checkpointing):
    """Checkpointed layers run again in the backward pass, after another pass with other tokens."""
    model, one, two = llama().train(), documents((5,)), documents((90, 40), seed=3)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def gradients(*batches):
        model.zero_grad()
        sum(model(ids, labels=ids, use_cache=False).loss for ids in batches).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    want = []
    for ids in (one, two):
        with dx.apply(model, policy_for(model, CONTENT.resolve(ids))):
            want.append(gradients(ids))
    with dx.apply(model, policy_for(model)):
        for got, a, b in zip(gradients(one, two), *want, strict=True):
            torch.testing.assert_close(got, a + b, atol=1e-4, rtol=1e-3)


@needs_transformers
def test_a_definition_on_the_first_page_changes_the_last_page():
    """Three layers of windows pass information over 60 tokens. Information from further back needs a heading."""
    model, ids = llama(), documents((5,), seqlen=400)
    other = ids.clone()
    other[0, 9] = 20 + (ids[0, 9] - 19) % 40  # the definition under the heading is another one
    reach = {}
    for name, rule in (("dense", None), ("window", WINDOW), ("content", CONTENT)):
        with dx.apply(model, policy_for(model, rule)):
            reach[name] = (logits(model, input_ids=ids) - logits(model, input_ids=other))[0, -1].abs().max().item()
    assert reach["window"] == 0
    assert reach["content"] > 1e-3
    assert reach["dense"] > 1e-3


@needs_transformers
def test_compiled_copied_and_dropped_models():
    import copy
    import gc
    import pickle
    import weakref

    model, ids = llama(), documents((5,))
    dense = logits(model, input_ids=ids)
    handle = dx.apply(model, policy_for(model))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(logits(twin, input_ids=ids), dense)
    assert not torch.equal(logits(model, input_ids=ids), dense)
    close(logits(torch.compile(model, backend="eager", fullgraph=True), input_ids=ids, use_cache=False), dense)
    assert handle.stats()["dense_calls"] == {"no token ids": 3}  # compiled code does not hand them down
    handle.remove()
    assert torch.equal(logits(model, input_ids=ids), dense)
    handle, gone = dx.apply(model, policy_for(model)), weakref.ref(model.model)
    del model
    gc.collect()
    assert gone() is None
