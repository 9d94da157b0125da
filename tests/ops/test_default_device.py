# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on torch's default device. The tests set it to "meta", whose tensors have no data."""

import pytest
import torch

import dynaxx as dx
from dynaxx.layout.paging import PagedCache
from dynaxx.selection.pages import PageBudget

PATTERN = dx.SlidingWindow(40) | dx.Sink(4)


@pytest.fixture
def qkv():
    return tuple(torch.randn(1, 300, heads, 16) for heads in (4, 2, 2))


CALLS = {
    "patterns": lambda q, k, v: (
        (PATTERN | dx.RandomBlocks(2) | dx.GlobalTokens(3)).layout(317, block_size=16).kv_indices
    ),
    "others": lambda q, k, v: ((dx.Dilated(8, 2) | dx.Strided(9)) & dx.Documents((0, 90, 283))).layout(283).kv_indices,
    "block indices": lambda q, k, v: (
        dx.BlockLayout.from_block_indices(
            torch.zeros(1, 1, 10, 1, dtype=torch.int64, device="cpu"), 300, block_size=32
        ).kv_indices
    ),
    "attention": lambda q, k, v: dx.sparse_attention(q, k, v, PATTERN.layout(300, block_size=32)),
    "gathers": lambda q, k, v: dx.sparse_attention(q.double(), k.double(), v.double(), PATTERN.layout(300)),
    "top-k": lambda q, k, v: dx.select_blocks(q, k, PATTERN | dx.TopK(0.2), block_size=32).kv_indices,
    "top-p": lambda q, k, v: dx.select_blocks(q, k, PATTERN | dx.TopP(0.8, dx.MinMax()), block_size=32).kv_indices,
    "clusters": lambda q, k, v: dx.select_blocks(q, k, dx.TopK(0.2, dx.KeyClusters()), block_size=32).kv_indices,
    "packed": lambda q, k, v: (
        dx.select_packed_blocks(q[0], k[0], PATTERN | dx.TopK(0.3), (0, 100, 300), block_size=16).kv_indices
    ),
    "packed patterns": lambda q, k, v: dx.packed_layout(PATTERN, (0, 90, 290), block_size=16).kv_indices,
    "decoding": lambda q, k, v: dx.sparse_decode(
        q[:, :1], dx.summarize_pages(PagedCache.contiguous(k, v, page_size=16)), PageBudget(0.2, window=16)
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_results_are_the_same(call, qkv):
    with torch.device("meta"):
        got = CALLS[call](*qkv)
    assert got.device.type == "cpu"
    assert torch.equal(got, CALLS[call](*qkv))


def test_gradients_too(qkv):
    q, k, v = (x.requires_grad_() for x in qkv)
    layout = PATTERN.layout(300, block_size=32)
    with torch.device("meta"):
        out = dx.sparse_attention(q, k, v, layout)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
