# SPDX-License-Identifier: Apache-2.0
"""Layouts of heads that read the blocks of other heads, some of them several times."""

import pytest
import torch

import dynaxx as dx


def chosen(batch=2, heads=3, seqlen_q=90, seqlen_k=130, budgets=(0.0, 0.3, 1.0)):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, n, heads, 16, generator=generator) for n in (seqlen_q, seqlen_k))
    return dx.select_blocks(q, k, dx.Sink(16) | dx.TopK(budgets, per="head"), block_size=16)


@pytest.mark.parametrize("heads", [(0, 1, 2), (2, 2, 0), (1,), (2, 0, 1, 1, 2)])
@pytest.mark.parametrize("spare", [None, 0, 37])
def test_heads_read_the_blocks_of_the_heads_they_name(heads, spare):
    layout = chosen()
    want = layout.to_dense()[:, list(heads)]
    capacity = None if spare is None else int(layout.kv_num_blocks[:, list(heads)].sum()) + spare
    taken = layout.take_heads(heads, capacity)
    taken.validate()
    assert torch.equal(taken.to_dense(), want)
    assert taken.nnz == int(layout.kv_num_blocks[:, list(heads)].sum())


def test_attention_over_taken_heads_equals_that_of_each_head():
    layout, generator = chosen(batch=1), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 3, 16, generator=generator) for n in (90, 130, 130))
    out = dx.sparse_attention(q, k, v, layout.take_heads((1, 1, 0)))
    again = dx.sparse_attention(q, k, v, layout.head_slice([1, 2, 0]))
    assert torch.equal(out[:, :, [0, 2]], again[:, :, [0, 2]])
    assert not torch.equal(out[:, :, 1], again[:, :, 1])


def test_layouts_without_blocks_of_their_own():
    shared = dx.SlidingWindow(32).layout(64, causal=True, block_size=16)
    assert shared.take_heads((0, 0)) is shared
    nothing = dx.BlockLayout.from_block_indices(torch.full((1, 2, 4, 1), -1), 64, block_size=16)
    assert nothing.take_heads((1, 1, 0)).nnz == nothing.take_heads((1, 1, 0), 5).validate().nnz == 0
    no_queries = dx.BlockLayout.from_block_indices(torch.empty(1, 2, 0, 1, dtype=torch.long), 0, 32, block_size=16)
    assert no_queries.take_heads((0, 1)).q_blocks == 0


@pytest.mark.parametrize("heads", [(), (0, 3), (-1,)])
def test_heads_that_do_not_exist_are_refused(heads):
    with pytest.raises(ValueError, match=r"`heads` must be heads from 0 to 2, got \["):
        chosen().take_heads(heads)
