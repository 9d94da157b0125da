"""`dynaxx.apply` in real transformers models with random weights: exact where dense, exact to the mask where sparse."""

import copy
import logging

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.masks import Run, read_mask
from dynaxx.integrations.transformers import attention_layers, full_attention_layers, model_facts
from dynaxx.testing import oracle_attention

transformers = pytest.importorskip("transformers")
KEEP_ALL = dx.SlidingWindow(16) | dx.TopK(1.0)
SPARSE = dx.SlidingWindow(24) | dx.Sink(4) | dx.TopK(0.3)


def llama(seed=0, **changes):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gemma3(seed=0):
    torch.manual_seed(seed)
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=1024, sliding_window=40, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], query_pre_attn_scalar=20,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


def policy_for(model, *rules, **fields):
    fields = {"block_size": 16, **fields}
    return dx.Policy(model=model_facts(model), rules=rules or (dx.Rule.of(KEEP_ALL),), **fields)


def tokens(*shape, seed=1):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, **inputs):
    return model(**inputs).logits


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


def left_padded(model):
    mask = torch.ones(3, 100, dtype=torch.int64)
    mask[0, :37], mask[2, :80] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": tokens(3, 100), "attention_mask": mask, "position_ids": positions}, mask.bool()


def right_padded(model):
    mask = torch.ones(3, 100, dtype=torch.int64)
    mask[0, 70:], mask[1, 20:] = 0, 0
    return {"input_ids": tokens(3, 100), "attention_mask": mask}, mask.bool()


def packed(model):
    positions = torch.cat([torch.arange(n) for n in (40, 1, 64, 25)])[None]
    return {"input_ids": tokens(1, 130), "position_ids": positions, "use_cache": False}, None


def whole(model):
    return {"input_ids": tokens(2, 130)}, None


def prefix_visible(model):
    mask = torch.ones(130, 130, dtype=torch.bool).tril()
    mask[:30, :30] = True
    return {"input_ids": tokens(1, 130), "attention_mask": mask[None, None]}, None


INPUTS = (whole, left_padded, right_padded, packed, prefix_visible)


@pytest.mark.parametrize("make", (llama, gemma3))
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


@pytest.mark.parametrize("rule", (SPARSE, dx.SlidingWindow(20) | dx.Sink(3)))
@pytest.mark.parametrize("inputs", INPUTS)
def test_sparse_is_the_mask_and_each_sequences_own_layout(inputs, rule):
    """Against eager attention under (mask and layout): the layout of every sequence as if it were alone."""
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
