# SPDX-License-Identifier: Apache-2.0
"""Small random models of transformers, policies for them, and inputs with every kind of mask."""

import pytest
import torch

import dynaxx as dx
from dynaxx.integrations.transformers.apply_policy import model_facts

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


def small(config_class, model_class, **changes):
    config = config_class(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, **changes,
    )  # fmt: skip
    return model_class(config).eval()


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
