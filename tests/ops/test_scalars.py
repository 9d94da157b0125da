# SPDX-License-Identifier: Apache-2.0
"""A scalar argument may be any number. A tensor whose gradient would be lost is refused, with what to do instead."""

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

import dynaxx as dx
from dynaxx.integrations.flash_attn import flash_attn_func
from dynaxx.layout.paging import PagedCache
from dynaxx.trained.tokens.indexer import index_loss

Q, K = torch.randn(1, 32, 2, 16), torch.randn(1, 32, 2, 16)
LAYOUT = dx.Causal().layout(32, block_size=16)
BLOCKS = torch.zeros(1, 32, 2, 1, dtype=torch.int32)
INDEX = torch.randn(1, 32, 2, 8), torch.randn(1, 32, 8), torch.rand(1, 32, 2)
CALLS = {
    "scale": {
        "sparse_attention": lambda x: dx.sparse_attention(Q, K, K, LAYOUT, scale=x),
        "reference": lambda x: dx.sparse_attention(Q, K, K, LAYOUT, scale=x, backend="reference"),
        "select_blocks": lambda x: dx.select_blocks(Q, K, dx.TopK(1), block_size=16, scale=x).kv_indices,
        "recall": lambda x: dx.recall(Q, K, LAYOUT, scale=x).mean,
        "sparse_decode": lambda x: dx.sparse_decode(Q[:, -1:], PagedCache.contiguous(K, K, page_size=16), scale=x),
        "selected_attention": lambda x: dx.trained.selected_attention(Q, K, K, BLOCKS, scale=x),
        "single tokens": lambda x: dx.trained.selected_attention(Q, K, K, BLOCKS, block_size=1, scale=x),
        "index_loss": lambda x: index_loss(*INDEX, Q, K, scale=x).loss,
        "flash_attn": lambda x: flash_attn_func(Q, K, K, softmax_scale=x),
    },
    "softcap": {
        "sparse_attention": lambda x: dx.sparse_attention(Q, K, K, LAYOUT, softcap=x),
        "sparse_decode": lambda x: dx.sparse_decode(Q[:, -1:], PagedCache.contiguous(K, K, page_size=16), softcap=x),
        "selected_attention": lambda x: dx.trained.selected_attention(Q, K, K, BLOCKS, softcap=x),
        "explain": lambda x: str(dx.explain(Q, K, K, LAYOUT, softcap=x)),
        "flash_attn": lambda x: flash_attn_func(Q, K, K, softcap=x),
    },
    "index_scale": {"index_loss": lambda x: index_loss(*INDEX, Q, K, index_scale=x).loss},
}
CACHE = dx.summarize_pages(PagedCache.contiguous(Q, K, page_size=16))
RULES = {
    "budget of pages": lambda x: dx.sparse_decode(Q[:, -1:], CACHE, dx.PageBudget(x)),
    "budgets of heads": lambda x: dx.sparse_decode(Q[:, -1:], CACHE, dx.PageBudget((x, x))),
    "TopK": lambda x: dx.select_blocks(Q, K, dx.TopK(x), block_size=16).kv_indices,
    "TopK of heads": lambda x: dx.select_blocks(Q, K, dx.TopK((x, x)), block_size=16).kv_indices,
    "TopP": lambda x: dx.select_blocks(Q, K, dx.TopP(x), block_size=16).kv_indices,
    "bound": lambda x: dx.summarize_pages(PagedCache.contiguous(Q, K, page_size=16), bound=x).summaries.low,
    "MeanQuery": lambda x: dx.select_blocks(Q, K, dx.TopK(1, dx.MeanQuery(x)), block_size=16).kv_indices,
}
COUNTS = {
    "pages": lambda x: dx.sparse_decode(Q[:, -1:], CACHE, dx.PageBudget(x, sinks=x)),
    "blocks": lambda x: dx.select_blocks(Q, K, dx.TopK(x), block_size=16).kv_indices,
    "tokens": lambda x: torch.tensor(type(dx.trained.TopKTokens(x).k) is int),
    "sizes": lambda x: torch.tensor(type(dx.trained.NsaSizes(slc_count=x, local_blocks=0).slc_count) is int),
    "window": lambda x: dx.SlidingWindow(x).layout(32, block_size=16).kv_indices,
    "ends": lambda x: dx.Documents((0, x, 32)).layout(32, block_size=16).kv_indices,
    "length": lambda x: dx.Causal().layout(x, block_size=16).kv_indices,
    "page": lambda x: torch.tensor(type(PagedCache.contiguous(K, K, page_size=x).page_size) is int),
    "new": lambda x: dx.summarize_pages(CACHE, new_tokens=x).summaries.low,
    "distance": lambda x: dx.sparse_attention(
        Q, K, K, LAYOUT, position_bias=dx.T5Bias(torch.arange(8.0).view(4, 2), max_distance=x)
    ),
}
EACH = [(name, call) for name, calls in CALLS.items() for call in calls]


@pytest.mark.parametrize(("name", "call"), EACH)
def test_any_number(name, call):
    run = CALLS[name][call]
    wanted = run(0.5)
    for value in (torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), np.array(0.5), torch.tensor(0.5).double()):
        found = run(value)
        assert torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted


@pytest.mark.parametrize("rule", RULES)
def test_rules_take_any_number(rule):
    wanted = RULES[rule](0.5)
    for value in (torch.tensor(0.5), np.float32(0.5), np.float64(0.5)):
        assert torch.equal(RULES[rule](value), wanted)
    with pytest.raises(TypeError, match=r"must be a number, got a tensor that requires a gradient"):
        RULES[rule](torch.tensor(0.5, requires_grad=True))


@pytest.mark.parametrize("rule", COUNTS)
def test_rules_take_any_integer(rule):
    wanted = COUNTS[rule](2)
    assert all(torch.equal(COUNTS[rule](value), wanted) for value in (torch.tensor(2), np.int64(2), np.int8(2)))
    for value in (True, np.True_, torch.tensor(True)):
        with pytest.raises(TypeError, match=r"must be (an integer|a number|int)"):
            COUNTS[rule](value)


@pytest.mark.parametrize(("name", "call"), EACH)
def test_a_gradient_is_not_lost(name, call):
    run, learned = CALLS[name][call], torch.tensor(0.5, requires_grad=True)
    for value in (learned, learned * 2, torch.nn.Parameter(torch.ones(1))):
        with pytest.raises(
            TypeError, match=rf"`(softmax_)?{name}` must be a number, got a tensor that requires a grad"
        ):
            run(value)
    with pytest.raises((TypeError, NotImplementedError), match=r"transform of torch.func|no rules for torch.func"):
        grad(lambda x: torch.as_tensor(run(x)).float().sum())(torch.tensor(0.5))
    with pytest.raises((TypeError, NotImplementedError), match=r"transform of torch.func|no rules for torch.func"):
        vmap(run)(torch.tensor([0.5, 1.0]))
    for value in (torch.ones(2), "0.5", 1j, True, np.True_, torch.tensor(True)):
        with pytest.raises((TypeError, ValueError), match=r"`(softmax_)?" + name):
            run(value)


def test_an_integer_of_more_than_64_bits_is_named():
    with pytest.raises(TypeError, match="`seqlen_q` must be int of at most 64 bits, got 1180591620717411303424"):
        dx.Causal().layout(2**70)
