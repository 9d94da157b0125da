# SPDX-License-Identifier: Apache-2.0
"""`TopKTokens` and the choice of the best scores: the exact top-k, ties by index, any length."""

import pytest
import torch

import dynaxx as dx
from dynaxx.core import library
from dynaxx.trained.tokens.kernels.cpu.indexer import best_scores

ISAS = ["", "torch"]


def by_sorting(scores, counts, slots):
    rows = []
    for row, count in zip(scores.tolist(), counts.tolist(), strict=True):
        best = sorted(sorted(range(min(count, len(row))), key=lambda i: -row[i])[:slots])
        rows.append(best + [-1] * (slots - len(best)))
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), slots)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("width", "slots"), [(1, 1), (5, 9), (700, 3), (3000, 64), (3000, 1200), (4000, 0)])
def test_best_scores(isa, width, slots, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    torch.manual_seed(width + slots)
    scores = torch.cat([torch.randn(4, width), torch.randint(-3, 3, (4, width)).float(), torch.zeros(2, width)])
    scores[1, ::3] = torch.inf
    scores[2, ::2] = -0.0
    scores[3] = scores[3].sort().values  # each is better than those before
    counts = torch.tensor([width, width // 2, width, width, 0, 1, width, width, width, max(0, width - 1)])
    assert torch.equal(best_scores(scores, counts, slots), by_sorting(scores, counts, slots))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (3, 70), (75, 70)])
def test_the_tokens_with_most_attention(isa, size, queries, keys, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    q, k = torch.randn(2, queries, 6, 16), torch.randn(2, keys, 2, 16)
    chosen = dx.trained.TopKTokens(8, block_size=size).select(q, k)
    assert chosen.shape == (2, queries, 2, 8 // size)
    weights = (q.unflatten(2, (2, 3)).permute(0, 2, 3, 1, 4) @ k.permute(0, 2, 3, 1)[:, :, None]) / 4
    position = torch.arange(queries) + keys - queries
    hidden = torch.arange(keys) > position[:, None]
    mass = weights.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0).sum(2)  # (B, Hk, N, M)
    blocks = torch.nn.functional.pad(mass, (0, -keys % size)).unflatten(-1, (-1, size)).sum(-1)
    for b in range(2):
        for h in range(2):
            counts = (position.div(size, rounding_mode="floor") + 1).clamp(min=0)
            want = by_sorting(blocks[b, h], counts, 8 // size)
            got = chosen[b, :, h]
            assert torch.equal(got, want)
    v = torch.randn(2, keys, 2, 16)
    dx.trained.selected_attention(q, k, v, chosen, block_size=size)


def test_packed_and_all():
    q, k, v = torch.randn(90, 4, 8), torch.randn(90, 2, 8), torch.randn(90, 2, 8)
    ends = (0, 40, 40, 90)
    chosen = dx.trained.TopKTokens(64).select(q, k, cu_seqlens_q=ends)
    assert torch.equal(chosen[:40], dx.trained.TopKTokens(64).select(q[None, :40], k[None, :40])[0])
    got = dx.trained.selected_attention(q, k, v, chosen, block_size=1, cu_seqlens_q=ends)
    dense = dx.sparse_attention(q, k, v, dx.packed_layout(dx.Causal(), ends))
    torch.testing.assert_close(got, dense, atol=2e-6, rtol=1e-5)  # 64 of at most 50: all


def test_errors():
    for wrong in ({"k": 0}, {"k": 6, "block_size": 4}, {"k": 6, "block_size": 3}, {"k": 1 << 30}):
        with pytest.raises(ValueError, match="must be"):
            dx.trained.TopKTokens(**wrong)
    q, k = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 3, 8)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        dx.trained.TopKTokens(4).select(q, k)
    with pytest.raises(ValueError, match="go with packed"):
        dx.trained.TopKTokens(4).select(q, q, cu_seqlens_q=(0, 9))
    with pytest.raises(ValueError, match="end at 9 and 9"):
        dx.trained.TopKTokens(4).select(q[0], q[0], cu_seqlens_q=(0, 8))
