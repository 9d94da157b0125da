# SPDX-License-Identifier: Apache-2.0
"""BigBird and BigBirdPegasus on dynaxx against transformers' own code on random weights, random blocks included."""

import copy

import numpy as np
import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.encoders import apply_to_encoder
from encoders import SERVED, assert_as_exact_as_transformers, hidden
from families import older_transformers

transformers = pytest.importorskip("transformers")
from dynaxx.integrations.encoders.bigbird_blocks import Visits, draw_random_blocks  # noqa: E402  (needs transformers)


def bigbird(kind="BigBirdModel", **changes):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "block_size": 16, "num_random_blocks": 2, "max_position_embeddings": 512, "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0, "initializer_range": 0.2,
    }  # fmt: skip
    return getattr(transformers, kind)(transformers.BigBirdConfig(**{**fields, **changes})).eval()


def pegasus(**changes):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 64, "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "block_size": 16,
        "num_random_blocks": 2, "max_position_embeddings": 512, "dropout": 0.0, "attention_dropout": 0.0,
        "init_std": 0.2,
    }  # fmt: skip
    return transformers.BigBirdPegasusModel(transformers.BigBirdPegasusConfig(**{**fields, **changes})).eval()


def inputs_of(length, padding="none", batch=2):
    chance = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 64, (batch, length), generator=chance)
    seen = torch.ones_like(ids)
    if padding == "right":
        seen[0, length // 2 :], seen[-1, length - 3 :] = 0, 0
    elif padding == "anywhere":
        seen = (torch.rand(ids.shape, generator=chance) < 0.7).long()
    return {"input_ids": ids, "attention_mask": seen}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("length", "padding"), [(160, "none"), (145, "right"), (171, "anywhere")])
def test_block_sparse(length, padding, training):
    model = bigbird().train(training)
    assert_as_exact_as_transformers(model, inputs_of(length, padding))
    assert model.attention_type == "block_sparse"


@pytest.mark.parametrize("training", [False, True])
def test_lengths_with_a_plan_of_their_own(training):
    """1,024 tokens use the plan of the longest sequence, which may draw the last block, although that block is
    global.
    """
    model = bigbird(max_position_embeddings=4096, block_size=64).train(training)
    assert_as_exact_as_transformers(model, inputs_of(1024, "right", batch=1))


@pytest.mark.parametrize("block_size", [32, 48])
def test_blocks_of_other_sizes(block_size):
    model = bigbird(block_size=block_size, num_random_blocks=1, max_position_embeddings=1024)
    assert_as_exact_as_transformers(model, inputs_of(7 * block_size + 5, "right", batch=1))


@pytest.mark.parametrize(("length", "padding"), [(1, "none"), (63, "right"), (130, "anywhere")])
def test_original_full(length, padding):
    model = bigbird(attention_type="original_full")
    inputs = inputs_of(length, padding)
    inputs["attention_mask"][:, 0] = 1
    assert_as_exact_as_transformers(model, inputs)


@pytest.mark.parametrize("attention_type", ["block_sparse", "original_full"])
def test_exact_in_fp64(attention_type):
    model, inputs = bigbird(attention_type=attention_type).double().train(), inputs_of(160, "right")
    own = hidden(model, inputs)
    with apply_to_encoder(model):
        torch.testing.assert_close(hidden(model, inputs), own, atol=1e-11, rtol=0)


@pytest.mark.parametrize("training", [False, True])
def test_pegasus(training):
    model, inputs = pegasus().train(training), inputs_of(160, "right")
    own = model(**inputs).encoder_last_hidden_state
    with dx.apply(model) as handle:
        torch.testing.assert_close(model(**inputs).encoder_last_hidden_state, own, atol=2e-5, rtol=2e-5)
        assert handle.stats() == SERVED


def test_random_blocks_are_the_models_own_and_the_generator_stays_put():
    module = bigbird().train().encoder.layer[1].attention.self
    np.random.seed(99)
    before = np.random.get_state()[1].copy()
    drawn = draw_random_blocks(module, 320)
    assert np.array_equal(np.random.get_state()[1], before)
    assert drawn.shape == (4, 18, 2)
    assert torch.equal(drawn, draw_random_blocks(module, 320))
    other = bigbird().train().encoder.layer[0].attention.self
    assert not torch.equal(drawn, draw_random_blocks(other, 320))
    assert not draw_random_blocks(module.eval(), 320).any()


def test_visits_count_what_is_attended_twice():
    drawn = torch.zeros(2, 6, 3, dtype=torch.int64)
    drawn[1, 2] = torch.tensor([7, 3, 5])  # of block 3: the last, its own, a new one
    visits = Visits(drawn, 16, torch.device("cpu"))
    assert visits.counts[0, 3].tolist() == [4, 0, 1, 1, 1, 0, 0, 1]
    assert visits.counts[1, 3].tolist() == [1, 0, 1, 2, 1, 1, 0, 2]
    assert visits.counts[0, 0].tolist() == visits.counts[1, 7].tolist() == [1] * 8
    assert sum(m * layout.nnz for m, layout in visits.by_count) == visits.counts.sum()


@pytest.mark.parametrize("attention_type", ["block_sparse", "original_full"])
def test_gradients(attention_type):
    model, inputs = bigbird(attention_type=attention_type).train(), inputs_of(160, "right")
    towards = torch.randn(2, 160, 64, generator=torch.Generator().manual_seed(5))

    def gradients():
        model.zero_grad()
        (model(**inputs).last_hidden_state * towards).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with apply_to_encoder(model) as handle:
        found = gradients()
        assert handle.stats() == SERVED
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5 * largest)


def test_a_short_sequence_turns_the_model_dense_and_dynaxx_stays():
    """transformers replaces its attention modules in the middle of a forward pass."""
    model, short, long = bigbird(), inputs_of(40, "right"), inputs_of(160)
    expected = [hidden(copy.deepcopy(model), short)]
    with dx.apply(model) as handle:
        torch.testing.assert_close(hidden(model, short), expected[0], atol=2e-5, rtol=1e-4)
        assert model.attention_type == "original_full"
        ours = hidden(model, long)
        assert handle.stats() == {"sparse_calls": 4, "dense_calls": {}}
        model.set_attention_type("block_sparse")
        sparse = hidden(model, long)
        assert handle.stats() == {"sparse_calls": 6, "dense_calls": {}}
    assert {type(m).__name__ for m in model.modules()} == {type(m).__name__ for m in bigbird().modules()}
    torch.testing.assert_close(hidden(model, long), sparse, atol=2e-5, rtol=1e-4)
    model.set_attention_type("original_full")
    torch.testing.assert_close(hidden(model, long), ours, atol=2e-5, rtol=1e-4)


def test_replaced_modules_are_restored():
    model = bigbird("BigBirdForQuestionAnswering")
    modules, names = list(model.modules()), list(model.state_dict())
    with dx.apply(model):
        assert list(model.state_dict()) == names
        with pytest.raises(ValueError, match="runs on dynaxx already"):
            dx.apply(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


@pytest.mark.parametrize("by_config", [False, True])
@pytest.mark.parametrize("attention_type", ["block_sparse", "original_full"])
def test_attention_weights_come_from_transformers(attention_type, by_config):
    model, inputs = bigbird(attention_type=attention_type), inputs_of(160, "right")
    wanted = {} if by_config else {"output_attentions": True}
    if by_config:
        model.config.output_attentions = True
    with dx.apply(model) as handle:
        ours = model(**inputs, **wanted)
        assert handle.stats() == {"sparse_calls": 0, "dense_calls": {"output_attentions": 2}}
        model.config.output_attentions = False
        hidden(model, inputs)
        assert handle.stats()["sparse_calls"] == 2
    own = model(**inputs, output_attentions=True)
    assert len(ours.attentions) == 2
    for a, b in zip(own.attentions, ours.attentions, strict=True):
        assert torch.equal(a, b)


def test_unserved_calls_are_counted():
    model, inputs = bigbird(attention_type="original_full", attention_probs_dropout_prob=0.5).train(), inputs_of(40)
    with dx.apply(model) as handle:
        model(**inputs)
        assert handle.stats()["dense_calls"] == {"attention dropout": 2}
        model.eval()
        handle.reset_stats()
        weighed = inputs["attention_mask"].float()
        weighed[0] = 0
        model(**inputs | {"attention_mask": weighed})
        assert handle.stats()["dense_calls"] == {"a sequence without keys": 2}
    sparse = bigbird()
    halves = inputs_of(160)
    halves["attention_mask"] = halves["attention_mask"] * 0.5
    own = hidden(sparse, halves)
    with dx.apply(sparse) as handle:
        assert torch.equal(hidden(sparse, halves), own)
        assert handle.stats()["dense_calls"] == {"mask is not 0 or 1": 2}


@older_transformers
def test_a_decoder_stays_dense():
    inputs = inputs_of(40)
    decoder = bigbird("BigBirdForCausalLM", is_decoder=True, attention_type="original_full")
    own = decoder(**inputs, use_cache=False).logits
    with dx.apply(decoder) as handle:
        assert torch.equal(decoder(**inputs, use_cache=False).logits, own)
        assert handle.stats()["dense_calls"] == {"mask differs by query": 2}
        decoder(**inputs, use_cache=True)
        assert handle.stats()["dense_calls"]["cross attention or a cache"] == 2


def test_blocks_that_no_layout_has_are_refused_before_anything_changes():
    model = bigbird(block_size=8)
    modules = list(model.modules())
    with pytest.raises(dx.UnsupportedInputError, match="blocks of 8 tokens; they must be a multiple of 16"):
        dx.apply(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
