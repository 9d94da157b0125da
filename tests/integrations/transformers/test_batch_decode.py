# SPDX-License-Identifier: Apache-2.0
"""Decode rules in transformers' continuous batching: each request selects the pages that it would select alone."""

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts
from dynaxx.integrations.transformers.batches.step import CachedRequest
from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.telemetry import recorder
from families import older_transformers

transformers = pytest.importorskip("transformers")
pytestmark = older_transformers

LENGTHS = (5, 200, 97, 1, 150, 64, 131)
NEW = 10
RULE = dx.Sink(4) | dx.SlidingWindow(20) | dx.TopK(2, dx.MinMax())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=96, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.6,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def decode_rule(rule=RULE, page_size=16, **fields):
    return dx.Rule.of(rule, phase="decode", block_size=page_size, **fields)


def policy_of(model, *rules, **fields):
    return dx.Policy(model=model_facts(model), block_size=16, rules=rules or (decode_rule(),), **fields)


def prompts(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]


def settings(**fields):
    fields = {"do_sample": False, **fields}
    return transformers.GenerationConfig(max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, **fields)


def served(model, asked, *, page_size=32, num_blocks=64, max_batch_tokens=1024, **fields):
    """Return the new tokens by request, with all requests at once."""
    config = transformers.ContinuousBatchingConfig(
        page_size=page_size, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, **fields
    )
    found = model.generate_batch(asked, generation_config=settings(), continuous_batching_config=config)
    assert len(found) == len(asked)
    return [(list(one.prompt_ids), list(one.generated_tokens)) for one in found.values()]


def alone(model, asked):
    """Generate the same tokens, one request at a time."""
    generate = lambda ids: model.generate(torch.tensor([ids]), generation_config=settings())[0, len(ids) :].tolist()
    return [(ids, generate(ids)) for ids in asked]


def same(found, expected):
    return sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    "page_size", [16, pytest.param(32, marks=pytest.mark.slow), pytest.param(48, marks=pytest.mark.slow)]
)
def test_each_request_decodes_as_it_would_alone(model, page_size):
    asked = prompts()
    dense = alone(model, asked)
    with dx.apply(model, policy_of(model)) as handle:
        expected = alone(model, asked)
        assert expected != dense
        handle.reset_stats()
        with handle.continuous_batching():
            assert same(served(model, asked, page_size=page_size), expected)
        stats = handle.stats()
        assert stats["sparse_calls"] == 3 * (NEW - 1)  # every layer, every step but that of the prompts
        assert stats["own_pattern_calls"] == 3  # the prompts
        assert not stats["dense_calls"]
        assert not stats["dense_sequences"]


def test_prompts_and_tokens_in_one_step(model):
    """Some requests arrive later, so that steps mix prompts, chunks of prompts and single tokens."""
    rules = dx.Rule.of(dx.SlidingWindow(24)), decode_rule()
    with dx.apply(model, policy_of(model, *rules)) as handle:
        asked = prompts()
        expected = alone(model, asked)
        with handle.continuous_batching():
            assert same(served(model, asked, max_batch_tokens=210), expected)


@pytest.mark.parametrize("tokens", [pytest.param(48, marks=pytest.mark.slow), 33])
def test_chunks_of_prompts_are_no_decoding(model, tokens):
    """A chunk is not a decoding step, even if it is a single token."""
    with dx.apply(model, policy_of(model)) as handle:
        asked = prompts((*LENGTHS, 49, 34))
        expected = alone(model, asked)
        with handle.continuous_batching():
            assert same(served(model, asked, max_batch_tokens=tokens), expected)


def test_layers_with_budgets_and_pages_of_their_own(model):
    rules = (
        decode_rule(dx.SlidingWindow(16) | dx.TopK(1, dx.MinMax(0.0)), layers=[0], page_size=32),
        decode_rule(dx.TopK(0.3, dx.MinMax(0.5)), layers=[2]),
    )
    with dx.apply(model, policy_of(model, *rules)) as handle:
        asked = prompts()
        expected = alone(model, asked)
        with handle.continuous_batching():
            assert same(served(model, asked), expected)


@pytest.mark.slow
def test_blocks_that_are_given_to_other_requests(model):
    """A cache with room for two requests, so that blocks are freed and used again, many times."""
    asked = prompts((150, 131, 97, 140, 133, 64, 149, 120, 91, 150), seed=2)
    with dx.apply(model, policy_of(model)) as handle:
        expected = alone(model, asked)
        with handle.continuous_batching():
            assert same(served(model, asked, num_blocks=11), expected)
            assert same(served(model, asked, num_blocks=11, allow_block_sharing=False), expected)


def test_prefixes_that_requests_share(model):
    first = prompts((160,), seed=3)[0]
    asked = [first[:n] + tail for n in (160, 128, 96) for tail in prompts((3, 17, 1), seed=n)]
    with dx.apply(model, policy_of(model)) as handle:
        expected = alone(model, asked)
        with handle.continuous_batching():
            assert same(served(model, asked, max_batch_tokens=170), expected)


@pytest.mark.parametrize("sharing", [True, False])
def test_forked_requests(model, sharing):
    """Several answers share the blocks of a prompt, or copy them to blocks that another request used before."""
    asked = prompts((150, 131, 140, 90), seed=4)
    batching = transformers.ContinuousBatchingConfig(
        page_size=64, num_blocks=24, max_batch_tokens=300, allow_block_sharing=sharing
    )
    with dx.apply(model, policy_of(model)) as handle:
        expected = {tuple(ids): new for ids, new in alone(model, asked)}
        with handle.continuous_batching():
            found = model.generate_batch(
                asked,
                generation_config=settings(num_return_sequences=3, do_sample=True, top_k=1),
                continuous_batching_config=batching,
            )
        assert len(found) == 3 * len(asked)
        assert all(list(one.generated_tokens) == expected[tuple(one.prompt_ids)] for one in found.values())


def test_requests_that_are_cancelled(model):
    asked = prompts((150, 131, 97, 140, 133, 64, 149, 120), seed=5)
    batching = transformers.ContinuousBatchingConfig(page_size=32, num_blocks=14, max_batch_tokens=160)
    with dx.apply(model, policy_of(model)) as handle:
        expected = alone(model, asked)
        with handle.continuous_batching():
            manager = model.init_continuous_batching(generation_config=settings(), continuous_batching_config=batching)
            manager.start()
            try:
                names = [manager.add_request(ids, max_new_tokens=NEW) for ids in asked]
                for name in names[1::3]:
                    manager.cancel_request(name)
                kept = [name for place, name in enumerate(names) if place % 3 != 1]
                found = {name: manager.get_result(request_id=name, timeout=60) for name in kept}
            finally:
                manager.stop(block=True)
        for name, (_, new) in zip(names, expected, strict=True):
            if name in kept:
                assert list(found[name].generated_tokens) == new


def test_full_density_is_dense(model):
    asked = prompts()
    dense = alone(model, asked)
    with dx.apply(model, policy_of(model, decode_rule(dx.TopK(1.0)))) as handle, handle.continuous_batching():
        assert same(served(model, asked), dense)
        assert handle.stats()["sparse_calls"] == 3 * (NEW - 1)


@pytest.mark.slow
def test_dense_calls_are_counted(model):
    asked = prompts((100, 40))
    dense = alone(model, asked)
    with dx.apply(model, policy_of(model, dense_below=90)) as handle, handle.continuous_batching():
        served(model, asked)
        assert handle.stats()["sparse_calls"] == 3 * (NEW - 1)
        assert handle.stats()["dense_sequences"] == {"below dense_below": 3 * (NEW - 1)}  # the shorter one
        handle.reset_stats()
        handle.kill_switch.engage("test")
        assert same(served(model, asked), dense)
        assert handle.stats()["dense_calls"]["kill switch"] == 3 * (NEW - 1)
        handle.kill_switch.release()
    with dx.apply(model, policy_of(model, decode_rule(page_size=64))) as handle, handle.continuous_batching():
        assert same(served(model, asked, page_size=32), dense)
        assert handle.stats()["dense_calls"]["pages of another size"] == 3 * (NEW - 1)


def test_a_kernel_that_fails_gives_the_answer_of_dense(model):
    asked = prompts((100, 40))
    dense = alone(model, asked)

    def fault(layer):
        raise RuntimeError("no kernel today")

    with dx.apply(model, policy_of(model)) as handle, handle.continuous_batching():
        handle.faults.append(fault)
        assert same(served(model, asked), dense)
        reasons = handle.stats()["dense_calls"]
        assert reasons["kernel failed"] > 0
        assert handle.stats()["sparse_calls"] == 0


def test_a_policy_that_comes_while_requests_run_is_followed(model):
    """A policy with other pages and bounds makes new summaries."""
    asked = prompts()
    with dx.apply(model, policy_of(model)) as handle, handle.continuous_batching():
        served(model, asked)
        other = policy_of(model, decode_rule(dx.SlidingWindow(32) | dx.TopK(1, dx.MinMax(0.0)), page_size=32))
        assert handle.replace(other)
        found = served(model, asked)
    with dx.apply(model, other):
        assert same(found, alone(model, asked))


def test_steps_are_in_the_metrics(model):
    def calls():
        series = [one for one in recorder().snapshot() if one.metric.name == "dynaxx_layer_calls_total"]
        labels = [dict(zip(one.metric.all_labels, one.labels, strict=True)) for one in series]
        wanted = {"phase": "decode", "backend": "cpu"}
        return sum(one.value for one, own in zip(series, labels, strict=True) if wanted.items() <= own.items())

    with dx.apply(model, policy_of(model)) as handle, handle.continuous_batching():
        before = calls()
        served(model, prompts((100, 40)))
        assert calls() - before == 3 * (NEW - 1)


def step(past, new=1):
    return MaskRun(0, new, 0, past + new, True)


def test_summaries_of_a_request_end_where_its_keys_may_have_changed():
    request = CachedRequest([])
    assert not request.advance(step(0, 100), [3, 4, 5, 6], 32, generates=True)  # the prompt
    assert request.advance(step(100), [3, 4, 5, 6], 32, generates=True)
    request.summarized[0] = 101
    assert request.advance(step(101), [3, 4, 5, 6], 32, generates=True)
    assert request.summarized == {0: 101}
    assert request.advance(step(102), [3, 9, 5, 6], 32, generates=True)  # a block was put in place of an equal one
    assert request.summarized == {0: 32}
    request.summarized[0] = 103
    assert not request.advance(step(104), [3, 9, 5, 6], 32, generates=True)  # a step was missed
    assert request.summarized == {0: 103}
    assert not request.advance(step(0, 110), [3, 9, 5, 6], 32, generates=True)  # preempted: its prompt runs again
    assert request.summarized == {0: 0}
