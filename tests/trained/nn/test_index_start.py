# SPDX-License-Identifier: Apache-2.0
"""Indexers that start as attention's own heads."""

import pytest
import torch

import dynaxx as dx
from dynaxx.trained import nn
from dynaxx.trained.nn.indexed import _places


def make(kv_heads=3, dim=48, heads=8, dtype=torch.float32):
    torch.manual_seed(0)
    attention = nn.IndexedSparseAttention(
        64, 6, kv_heads, head_dim=16, choice=dx.trained.TopKTokens(16), index_heads=heads, index_dim=dim
    )
    with torch.no_grad():
        attention.q_proj.weight *= 8  # attention to few tokens
    return attention.to(dtype), (torch.randn(2, 200, 64) + 0.5).to(dtype)


@pytest.mark.parametrize(
    ("dim", "kv_heads", "head_dim", "begins", "columns"),
    [
        (128, 3, 64, [0, 64, 96], [[*range(64)], *2 * [[*range(16, 32), *range(48, 64)]]]),
        (64, 3, 64, [0], [[*range(64)]]),
        (32, 2, 64, [0], [[*range(16), *range(32, 48)]]),
        (79, 2, 64, [0], [[*range(64)]]),
        (200, 2, 64, [0, 64], [[*range(64)]] * 2),
        (7, 1, 8, [0], [[0, 1, 2, 4, 5, 6]]),
    ],
)
def test_places(dim, kv_heads, head_dim, begins, columns):
    found = _places(dim, kv_heads, head_dim)
    assert [start for start, _ in found] == begins
    assert [where for _, where in found] == columns


def test_the_indexer_has_heads_of_attention():
    attention, x = make()
    attention.start_indexer(x)
    queries, keys = attention.indexer.q_proj.weight.view(8, 48, 64), attention.indexer.k_proj.weight
    of_q, of_k = attention.q_proj.weight.view(6, 16, 64), attention.k_proj.weight.view(3, 16, 64)
    assert torch.equal(keys, of_k.flatten(0, 1))  # 16 columns of each kv head
    for head, (own, start) in enumerate([(0, 0), (2, 16), (4, 32), (1, 0), (3, 16), (5, 32)]):
        assert torch.equal(queries[head, start : start + 16], of_q[own])
        assert not queries[head, :start].any()
        assert not queries[head, start + 16 :].any()
    assert queries[6].any(), "heads that attention does not have stay as they were"
    weights = attention.indexer(x).weights
    assert (weights - 0.5).abs().mean() < 0.1


@pytest.mark.parametrize(("kv_heads", "dim", "heads"), [(3, 48, 6), (1, 16, 2), (2, 12, 4), (6, 64, 3)])
def test_it_finds_more_of_what_attention_sees(kv_heads, dim, heads):
    attention, x = make(kv_heads, dim, heads)
    rotary = tuple(torch.cat(2 * [f(torch.arange(200.0)[:, None] * 1000 ** -torch.linspace(0, 1, 8))], -1)
                   for f in (torch.cos, torch.sin))  # fmt: skip
    attention(x, rotary)
    before = attention.index_loss.recall
    attention.start_indexer(x)
    attention(x, rotary)
    assert attention.index_loss.recall > before + 0.1


def test_half_precision_and_few_tokens():
    attention, x = make(dtype=torch.bfloat16)
    attention.start_indexer(x)
    assert attention.indexer.q_proj.weight.dtype == torch.bfloat16
    assert all(p.isfinite().all() for p in attention.indexer.parameters())
    with pytest.raises(ValueError, match="at least 2 tokens"):
        attention.start_indexer(x[0, :1])
