# SPDX-License-Identifier: Apache-2.0
"""Layers of a model that read the blocks of earlier layers, by a policy's `shared`."""

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.runtime import guarding
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.policy import Guard, SharedChoice

transformers = pytest.importorskip("transformers")
SPARSE = dx.Sink(16) | dx.TopK((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), per="head")
MAP = (5, 5, 0, 1, 2, 0)


def llama(layers=4):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def policy_for(model, shared=((1, 0, MAP), (3, 2, MAP)), **fields):
    given = tuple(SharedChoice(layer=a, source=b, heads=c) for a, b, c in shared)
    return dx.Policy(
        model=model_facts(model), rules=(dx.Rule.of(SPARSE),), shared=given, **{"block_size": 16, **fields}
    )


def tokens(*shape, seed=1):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


def watched(model, policy, grad=False, **inputs):
    """Return the logits and the layouts of each layer."""
    seen = {}
    watch = lambda layer, layout: seen.setdefault(layer, []).append(layout)
    with dx.apply(model, policy) as handle, handle.watch(watch):
        with torch.set_grad_enabled(grad):
            out = model(**inputs).logits
        assert handle.stats()["sparse_calls"] == model.config.num_hidden_layers
    return out, seen


def padded():
    ones = torch.ones(2, 160, dtype=torch.long)
    ones[1, :40] = 0
    return {"input_ids": tokens(2, 160), "attention_mask": ones}


@pytest.mark.parametrize("inputs", [{"input_ids": tokens(1, 160)}, {"input_ids": tokens(2, 160)}, padded()])
def test_layers_read_the_blocks_of_the_heads_they_name(inputs):
    model = llama()
    _, seen = watched(model, policy_for(model), **inputs)
    for source, reader in ((0, 1), (2, 3)):
        for one, other in zip(seen[source], seen[reader], strict=True):
            assert torch.equal(one.to_dense()[:, list(MAP)], other.to_dense())
    assert not torch.equal(seen[0][0].to_dense(), seen[2][0].to_dense())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reads_the_same_blocks_as_a_cpu():
    model = llama()
    want = [watched(model, policy_for(model), input_ids=tokens(1, 160, seed=seed)) for seed in range(3)]
    model.cuda()
    for seed, (logits, layouts) in enumerate(want):  # later passes repeat the launches of the first
        ids = tokens(1, 160, seed=seed).cuda()
        found, seen = watched(model, policy_for(model), input_ids=ids)
        for layer, (layout,) in layouts.items():
            same = (seen[layer][0].to_dense().cpu() == layout.to_dense()).float().mean()
            assert same > 0.98, f"layer {layer}"  # scores of nearly equal blocks differ by rounding
        for source, reader in ((0, 1), (2, 3)):
            assert torch.equal(seen[source][0].to_dense()[:, list(MAP)], seen[reader][0].to_dense())
        assert (found.cpu() - logits).abs().mean() < 0.02


def test_a_source_further_back_serves_several_layers():
    model = llama()
    shared = ((2, 0, MAP), (3, 1, MAP))  # two sources at a time
    _, seen = watched(model, policy_for(model, shared), input_ids=tokens(1, 160))
    for source, reader in ((0, 2), (1, 3)):
        assert torch.equal(seen[source][0].to_dense()[:, list(MAP)], seen[reader][0].to_dense())


def test_the_output_is_exact_attention_over_the_read_blocks():
    model, ids = llama(2), tokens(1, 160)
    shared, _ = watched(model, policy_for(model, ((1, 0, tuple(range(6))),)), input_ids=ids)
    reused, _ = watched(model, policy_for(model, (), reuse=2), input_ids=ids)
    assert torch.equal(shared, reused)
    own, _ = watched(model, policy_for(model, ()), input_ids=ids)
    assert not torch.equal(shared, own)


def test_layers_choose_while_gradients_are_recorded():
    model, ids = llama(), tokens(1, 160)
    own, _ = watched(model, policy_for(model, ()), grad=True, input_ids=ids)
    found, _ = watched(model, policy_for(model), grad=True, input_ids=ids)
    assert torch.equal(own, found)


def test_chunks_of_a_prompt_and_generation():
    model, ids = llama(), tokens(1, 192)
    with dx.apply(model, policy_for(model)) as handle, torch.no_grad():
        first = model(ids[:, :128], use_cache=True)
        model(ids[:, 128:], past_key_values=first.past_key_values)
        assert handle.stats()["sparse_calls"] == 8
        text = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert text.shape[1] == 196


def test_the_guard_measures_the_blocks_that_were_read(monkeypatch):
    model, measured = llama(2), []
    measure = guarding.measure

    def spied(rows, v, layout, *rest):
        measured.append(layout)
        return measure(rows, v, layout, *rest)

    monkeypatch.setattr(guarding, "measure", spied)
    policy, seen = policy_for(model, ((1, 0, MAP),), guard=Guard(sample=1.0)), {}
    with dx.apply(model, policy) as handle, handle.watch(lambda layer, layout: seen.update({layer: layout})):
        with torch.no_grad():
            model(tokens(2, 160))
        handle.wait()
        assert handle.stats()["sparse_calls"] == 2
    want = [seen[layer].to_dense()[:1] for layer in (0, 1)]
    nominal = [each for each in measured if any(torch.equal(each.to_dense(), one) for one in want)]
    assert any(torch.equal(each.to_dense(), want[1]) for each in nominal)
    assert any(torch.equal(each.to_dense(), want[0]) for each in nominal)


def test_compiled_models_share_choices():
    model, ids = llama(2), tokens(1, 96)
    policy = policy_for(model, ((1, 0, MAP),))
    want, _ = watched(model, policy, input_ids=ids)
    with dx.apply(model, policy), torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(ids).logits, want, atol=1e-4, rtol=1e-4)
