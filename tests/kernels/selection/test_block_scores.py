# SPDX-License-Identifier: Apache-2.0
"""Scores of kv blocks by the core: the reference's, at every instruction set, and the choice of the best."""

import pytest
import torch

import dynaxx as dx
from dynaxx.core import library
from dynaxx.kernels.selection.cpu import block_scores
from dynaxx.selection import select_blocks
from isas import ISAS


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    if library.active_library() is None:
        pytest.skip("no compiler")
    return request.param


def expected_scores(queries, k, ends, kv_block):
    keys = k.double().permute(0, 2, 1, 3).repeat_interleave(queries.shape[1] // k.shape[2], 1)
    logits = queries.double() @ keys.transpose(-1, -2)
    logits = logits.masked_fill(torch.arange(k.shape[1]) >= ends[:, None], -torch.inf)
    return (
        torch.nn.functional.pad(logits, (0, -k.shape[1] % kv_block), value=-torch.inf)
        .unflatten(-1, (-1, kv_block))
        .logsumexp(-1)
    )


@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "rows", "head_dim", "tokens", "kv_block"),
    [
        (1, 9, 3, 7, 64, 200, 32),
        (2, 4, 2, 33, 48, 1000, 16),
        (1, 2, 1, 16, 128, 513, 64),
        (1, 3, 3, 1, 17, 129, 128),
        (2, 5, 1, 17, 7, 31, 32),
    ],
)
def test_scores_are_the_logs_of_summed_exponentials(isa, batch, q_heads, kv_heads, rows, head_dim, tokens, kv_block):
    torch.manual_seed(0)
    queries = torch.randn(batch, q_heads, rows, head_dim) / head_dim**0.25
    k = (torch.randn(batch, tokens, kv_heads, 2 * head_dim) / head_dim**0.25)[..., :head_dim]
    ends = torch.randint(-3, tokens + 5, (rows,)).sort().values.clamp(0, tokens)
    found = block_scores.block_scores(queries, k, ends, kv_block)
    torch.testing.assert_close(found, expected_scores(queries, k, ends, kv_block).float(), atol=2e-5, rtol=1e-5)


def test_empty_sides_and_extreme_scores(isa):
    assert (
        block_scores.block_scores(torch.zeros(1, 1, 0, 8), torch.zeros(1, 10, 1, 8), torch.zeros(0).long(), 16).numel()
        == 0
    )
    assert (
        block_scores.block_scores(torch.zeros(1, 2, 3, 8), torch.zeros(1, 0, 1, 8), torch.zeros(3).long(), 16).shape[-1]
        == 0
    )
    nothing = block_scores.block_scores(torch.randn(1, 1, 2, 8), torch.randn(1, 32, 1, 8), torch.zeros(2).long(), 16)
    assert bool((nothing == -torch.inf).all())
    large = block_scores.block_scores(torch.full((1, 1, 1, 8), 1e4), torch.randn(1, 32, 1, 8), torch.tensor([32]), 16)
    assert bool(large.isfinite().all())
    queries, k = torch.randn(1, 1, 1, 8), torch.randn(1, 32, 1, 8)
    k[0, 3] = torch.nan
    found = block_scores.block_scores(queries, k, torch.tensor([32]), 16)
    assert found.isnan().tolist() == [[[[True, False]]]]


def test_the_best_are_marked_and_the_first_of_equals(isa):
    inf, nan = torch.inf, torch.nan
    scores = torch.tensor([[1.0, 3.0, 3.0, -inf], [nan, 2.0, -inf, 2.0], [0.0, 0.0, 0.0, 0.0]])
    mark = lambda counts: block_scores.mark_best(scores, torch.tensor(counts)).int().tolist()
    assert mark([2, 1, 0]) == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert mark([1, 9, 3]) == [[0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 0]]
    assert mark([-1, 2**31 - 1, 4]) == [[0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]]
    torch.manual_seed(0)
    scores, counts = torch.randn(3, 50, 70), torch.randint(0, 80, (3, 50))
    ranks = scores.argsort(-1, descending=True).argsort(-1)
    assert torch.equal(block_scores.mark_best(scores, counts), ranks < counts[..., None])


@pytest.mark.parametrize("block_size", [16, 32, (64, 32)])
def test_layouts_are_those_of_torch(isa, monkeypatch, block_size):
    torch.manual_seed(0)
    q, k = torch.randn(2, 500, 4, 32), torch.randn(2, 530, 2, 32)
    rule = dx.LocalBlocks(2) | dx.TopK((0.1, 0.5, 0.0, 1.0), dx.MeanQuery(), 4, per="head")
    found = select_blocks(q, k, rule, block_size=block_size).to_dense()
    monkeypatch.setattr(block_scores, "serves", lambda *_: False)
    assert torch.equal(found, select_blocks(q, k, rule, block_size=block_size).to_dense())


def test_problems_that_the_core_does_not_score():
    x = torch.randn(1, 32, 1, 8)
    assert not block_scores.serves(x.bfloat16(), x.bfloat16())
    assert not block_scores.serves_scores(x, x.transpose(1, 3))
    assert not block_scores.serves(x, x.to("meta"))
    assert not block_scores.serves(x, torch.nn.Parameter(x))


def test_wrong_arguments_are_refused(isa):
    with pytest.raises(ValueError, match="core"):
        block_scores.block_scores(torch.randn(1, 3, 1, 8), torch.randn(1, 32, 2, 8), torch.tensor([32]), 16)
