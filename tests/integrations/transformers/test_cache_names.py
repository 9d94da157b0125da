# SPDX-License-Identifier: Apache-2.0
"""The KV cache is found under both of its names: `past_key_values`, and `cache` from transformers 5.24 on."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.integrations.transformers.hooks import DecoderArguments
from dynaxx.trained.nsa.spans import NsaSizes
from dynaxx.trained.transformers.nsa_llama import convert_to_nsa
from tiny import llama, tokens


class Newer(nn.Module):
    def forward(self, input_ids=None, cache=None, **kwargs):
        pass


class Older(nn.Module):
    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        pass


@pytest.mark.parametrize("body", [Newer, Older])
def test_arguments_have_the_cache_under_one_name(body):
    named, cache = DecoderArguments.of(body()).by_name, DynamicCache()
    name = "cache" if body is Newer else "past_key_values"
    assert named((1,), {name: cache})["past_key_values"] is cache
    assert named((1, cache), {})["past_key_values"] is cache
    assert named((1,), {"past_key_values": cache})["past_key_values"] is cache  # its older name still works
    assert named((1,), {}).get("past_key_values") is None
    assert named((1,), {name: cache, "other": 2})["kwargs"] == {"other": 2}


@pytest.mark.parametrize(("body", "name"), [(Newer, "cache"), (Older, "past_key_values")])
def test_a_cache_is_passed_under_the_models_name(body, name):
    assert with_cache(body(), 1) == {name: 1}


def test_an_output_has_its_cache_under_either_name():
    assert cache_of(SimpleNamespace(cache=1)) == 1
    assert cache_of(SimpleNamespace(cache=None, past_key_values=2)) == 2
    assert cache_of(SimpleNamespace(past_key_values=2)) == 2


def test_no_cache_is_found_without_the_old_name():
    class Output:
        cache = None

        @property
        def past_key_values(self):
            raise AssertionError("transformers warns here")

    assert cache_of(Output()) is None
    assert cache_of((1, 2)) is None


def test_an_output_without_a_cache_is_not_asked_for_the_older_name(monkeypatch):
    """transformers would log that the name is deprecated, in every command that runs a model without a cache."""
    output = CausalLMOutputWithPast(logits=torch.zeros(1))
    if hasattr(output, "cache"):
        monkeypatch.setattr(type(output), "past_key_values", property(lambda self: pytest.fail("asked")), raising=False)
    assert cache_of(output) is None


def nsa_attention():
    sizes = NsaSizes(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, first_blocks=1, local_blocks=1, window=10)
    return convert_to_nsa(llama(), sizes).model.layers[0].self_attn


@torch.no_grad()
def test_nsa_attention_reads_either_name():
    attention, ids = nsa_attention().eval(), tokens(1, 20)
    hidden = torch.randn(1, ids.shape[1], attention.config.hidden_size)
    angles = torch.randn(2, 1, ids.shape[1], attention.head_dim)
    angles = angles[0].cos(), angles[0].sin()

    def run(name):
        cache, outs = DynamicCache(), []
        for first, end in ((0, 19), (19, 20)):
            parts = tuple(each[:, first:end] for each in angles)
            outs.append(attention(hidden[:, first:end], parts, None, **{name: cache})[0])
        assert cache.get_seq_length() == 20, f"{name} is ignored"
        return torch.cat(outs, 1)

    torch.testing.assert_close(run("cache"), run("past_key_values"))
