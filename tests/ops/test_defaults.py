# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on torch's default dtype or device, or on which call came first.

The tests set the device to "meta", whose tensors have no data.
"""

import contextlib
from functools import partial

import pytest
import torch

import dynaxx as dx
from dynaxx import trained
from dynaxx.core.library import ISA_VARIABLE
from dynaxx.layout.paging import PagedCache
from dynaxx.patterns import base, packed
from dynaxx.selection import TileQueries
from dynaxx.selection.packed import select_packed_blocks
from dynaxx.selection.pages import PageBudget
from dynaxx.trained.nn import IndexedSparseAttention
from dynaxx.trained.tokens.indexer import index_tokens

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
    "packed": lambda q, k, v: (
        select_packed_blocks(q[0], k[0], PATTERN | dx.TopK(0.3), (0, 100, 300), block_size=16).kv_indices
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


NSA_SIZES = trained.NsaSizes(cmp_block=16, cmp_stride=16, slc_block=16, slc_count=4, window=32)


def by_nsa(q, k, v, backend):
    compressed = trained.compress(k, NSA_SIZES), trained.compress(v, NSA_SIZES)
    gates = q.new_full((*q.shape[:3], 3), 0.5)
    return trained.native_sparse_attention(q, k, v, compressed, gates, NSA_SIZES, backend=backend)


def by_tokens(q, k, v, backend):
    chosen = trained.TopKTokens(32).select(q, k)
    return trained.selected_attention(q, k, v, chosen, block_size=1, backend=backend)


def by_decode(q, k, v, backend):
    cache = dx.summarize_pages(PagedCache.contiguous(k, v, page_size=16))
    return dx.sparse_decode(q[:, :1], cache, PageBudget(0.2, window=16), backend=backend)


def by_indexer(q, k, v, backend):
    return index_tokens(q, k[:, :, :1].squeeze(2), torch.ones(1, 300, 4), trained.TopKTokens(32), backend=backend)


CHOOSING = {name: CALLS[name] for name in ("top-k", "top-p", "packed")} | {
    f"{by.__name__} on {backend}": partial(by, backend=backend)
    for by in (by_nsa, by_tokens, by_decode, by_indexer)
    for backend in ("cpu", "reference")
}


@pytest.mark.parametrize("call", CHOOSING)
def test_autocast_changes_no_choice(call, qkv):
    expected = CHOOSING[call](*qkv)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(CHOOSING[call](*qkv), expected)


def test_gradients_too(qkv):
    q, k, v = (x.requires_grad_() for x in qkv)
    layout = PATTERN.layout(300, block_size=32)
    with torch.device("meta"):
        out = dx.sparse_attention(q, k, v, layout)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


SCORERS = {
    "mean pool": dx.MeanPool(),
    "min max": dx.MinMax(),
    "tile queries": TileQueries(),
    "anti-diagonal": dx.AntiDiagonal(),
}


def blocks_of(q, keys=2):
    """Return ascending blocks of 16 keys for each query, (1, N, 2, keys) int32."""
    at = torch.arange(q.shape[1], dtype=torch.int32, device="cpu")[None, :, None, None] // 16
    return torch.cat([at * 0, at], -1).expand(-1, -1, 2, -1).masked_fill(torch.cat([at == 0, at < 0], -1), -1)


def gradients(run, *given):
    leaves = [x.detach().requires_grad_() for x in given]
    out = run(*leaves)
    return torch.cat([x.flatten() for x in (out, *torch.autograd.grad(out.square().sum(), leaves))])


MORE = {
    "nsa": partial(by_nsa, backend="cpu"),
    "nsa by the reference": partial(by_nsa, backend="reference"),
    "gradients": lambda q, k, v: gradients(
        lambda *x: dx.sparse_attention(*x, PATTERN.layout(300, block_size=32)), q, k, v
    ),
    "selected blocks": lambda q, k, v: gradients(
        lambda *x: dx.trained.selected_attention(*x, blocks_of(q), block_size=16), q, k, v
    ),
    "single tokens": lambda q, k, v: gradients(
        lambda *x: dx.trained.selected_attention(*x, blocks_of(q), block_size=1), q, k, v
    ),
    "indexer": lambda q, k, v: index_tokens(q, k[:, :, 0], v[:, :, 0, :4].abs(), dx.trained.TopKTokens(9)),
    "recall": lambda q, k, v: torch.tensor(
        dx.recall(q, k, PATTERN.layout(300), rows=40).mean, dtype=torch.float64, device="cpu"
    ),
    "merge": lambda q, k, v: dx.merge_states(
        [dx.sparse_attention(q, k, v, PATTERN.layout(300), return_lse=True)] * 2
    ).out,
    "int8 pages": lambda q, k, v: dx.sparse_decode(
        q[:, :1], dx.summarize_pages(PagedCache.quantized(k, v, torch.int8, page_size=16)), PageBudget(0.2, window=16)
    ),
    "dense": lambda q, k, v: dx.BlockLayout.from_dense(PATTERN.layout(300).to_dense()).kv_indices,
    "threshold": lambda q, k, v: dx.select_blocks(q, k, dx.Threshold(0.5), block_size=32).kv_indices,
    **{f"top-k by {name}": lambda q, k, v, scorer=scorer: dx.select_blocks(q, k, dx.TopK(0.2, scorer), block_size=32)
       .kv_indices for name, scorer in SCORERS.items()},
    **{f"top-p by {name}": lambda q, k, v, scorer=scorer: dx.select_blocks(q, k, dx.TopP(0.7, scorer), block_size=32)
       .kv_indices for name, scorer in SCORERS.items()},
}  # fmt: skip


def forget():
    """Drop cached layouts and tables."""
    base._cached_layout.clear()
    packed._cached.clear()


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)
    forget()


@pytest.mark.parametrize("isa", ["", "torch"])
@pytest.mark.parametrize("call", [*CALLS, *MORE])
def test_the_default_dtype_changes_nothing(call, isa, qkv, default_dtype, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, isa)
    run = (CALLS | MORE)[call]
    wanted = run(*qkv)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        forget()
        default_dtype(dtype)
        found = run(*qkv)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
        default_dtype(torch.float32)
        assert torch.equal(run(*qkv), wanted)  # with what was cached under the other dtype


@pytest.mark.parametrize("call", MORE)
def test_more_results_are_the_same_under_a_device(call, qkv):
    wanted = MORE[call](*qkv)
    forget()
    with torch.device("meta"):
        found = MORE[call](*qkv)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_learns_under_a_default_dtype(dtype, default_dtype):
    default_dtype(dtype)
    module = IndexedSparseAttention(64, 4, 2, choice=dx.trained.TopKTokens(8))
    out = module(torch.randn(1, 70, 64))
    out.square().sum().backward()
    assert out.dtype == dtype
    assert all(x.grad is None or x.grad.isfinite().all() for x in module.parameters())


@pytest.mark.parametrize("call", [*CALLS, *MORE])
def test_results_cached_in_inference_mode_serve_training(call, qkv):
    run = (CALLS | MORE)[call]
    wanted = run(*qkv)
    forget()
    with torch.inference_mode(), contextlib.suppress(RuntimeError):  # gradients are refused there
        run(*qkv)
    found = run(*(x.requires_grad_() for x in qkv))
    assert torch.equal(found.detach(), wanted)
    if found.requires_grad and call in CALLS:
        found.sum().backward()
