# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching under a policy gives each request the result that it has alone."""

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.policy import Rollout
from families import older_transformers

transformers = pytest.importorskip("transformers")
pytestmark = older_transformers

LENGTHS = (5, 200, 97, 1, 150, 64)
NEW = 6


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.6,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def policy_of(model, rule, **fields):
    return dx.Policy(model=model_facts(model), block_size=16, rules=(dx.Rule.of(rule),), **fields)


def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]


def settings():
    return transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


def served(model, max_batch_tokens=1024):
    """Return the tokens by prompt, with all prompts at once."""
    batching = transformers.ContinuousBatchingConfig(page_size=32, num_blocks=64, max_batch_tokens=max_batch_tokens)
    found = model.generate_batch(prompts(), generation_config=settings(), continuous_batching_config=batching)
    assert len(found) == len(LENGTHS)
    return {tuple(one.prompt_ids): list(one.generated_tokens) for one in found.values()}


def alone(model):
    """Return the tokens by prompt, one prompt at a time."""
    return {
        tuple(ids): model.generate(torch.tensor([ids]), generation_config=settings())[0, len(ids) :].tolist()
        for ids in prompts()
    }


def test_full_density_gives_the_tokens_of_dense(model):
    dense = served(model)
    assert dense == alone(model)
    with dx.apply(model, policy_of(model, dx.TopK(1.0))) as handle:
        with handle.continuous_batching():
            assert served(model) == dense
        assert handle.stats()["sparse_calls"] > 0
    assert served(model) == dense


def test_each_request_runs_as_it_would_alone(model):
    with dx.apply(model, policy_of(model, dx.SlidingWindow(24))) as handle:
        expected = alone(model)
        assert expected != served_dense(model, handle)
        with handle.continuous_batching():
            handle.reset_stats()
            assert served(model) == expected
            assert handle.stats()["sparse_calls"] > 0
        assert alone(model) == expected  # and the policy is at work again behind the block


def served_dense(model, handle):
    handle.kill_switch.engage("test")
    try:
        return alone(model)
    finally:
        handle.kill_switch.release()


def test_chunks_of_a_prompt_follow_the_policy(model):
    with dx.apply(model, policy_of(model, dx.TopK(1.0))) as handle, handle.continuous_batching():
        assert served(model, max_batch_tokens=48) == served_dense(model, handle)
        assert handle.stats()["sparse_calls"] > 0


def test_other_models_are_left_alone(model):
    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM._from_config(model.config, attn_implementation="sdpa").eval()
    expected = alone(other)
    with dx.apply(model, policy_of(model, dx.SlidingWindow(24))) as handle, handle.continuous_batching():
        assert alone(other) == expected
        assert served(other) == expected


def test_the_registry_is_as_it_was(model):
    before = transformers.AttentionInterface()["sdpa"]
    handle = dx.apply(model, policy_of(model, dx.SlidingWindow(24)))
    with handle.continuous_batching():
        with pytest.raises(RuntimeError), handle.continuous_batching():
            raise RuntimeError
        assert transformers.AttentionInterface()["sdpa"] is not before
    assert transformers.AttentionInterface()["sdpa"] is before
    assert handle.active
    with handle.continuous_batching():
        handle.remove()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="removed"):
        handle.continuous_batching()


def test_policies_that_tell_requests_apart_are_refused(model):
    with (
        dx.apply(model, policy_of(model, dx.SlidingWindow(24), rollout=Rollout(share=0.5))) as handle,
        pytest.raises(dx.UnsupportedInputError, match="share of the requests"),
        handle.continuous_batching(),
    ):
        pass
