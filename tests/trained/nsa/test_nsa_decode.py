# SPDX-License-Identifier: Apache-2.0
"""Decoding with native sparse attention over pages gives, token by token, the result of the training forward."""

import copy
import random
from dataclasses import replace

import pytest
import torch

import dynaxx as dx
from interpreter import DEVICE, INTERPRETED, on_gpu, run_interpreted, starts_interpreter

BACKEND = "triton" if DEVICE == "cuda" or INTERPRETED else "cpu"
GROUPS = {"cpu": range(1, 17), "triton": (1, 3, 16)}[BACKEND]
STEPS = {"cpu": 40, "triton": 2 if INTERPRETED else 24}[BACKEND]
SEEDS = 8 if BACKEND == "cpu" else 2


def random_sizes(rng):
    if DEVICE == "cuda":  # two kinds only, because each is compiled
        return rng.choice(
            (dx.trained.NsaSizes(window=70, slc_count=4), dx.trained.NsaSizes(24, 8, 32, 3, 1, 0, 20, "max"))
        )
    slc_block = rng.choice((16, 32, 64))
    stride = rng.choice([size for size in (4, 8, 16) if size <= slc_block])
    cmp_block = rng.choice([size for size in (stride, 2 * stride, 3 * stride) if size <= slc_block])
    first, local, more = rng.choice((0, 1, 2)), rng.choice((0, 1, 2)), rng.choice((0, 1, 3))
    count, window = max(1, first + local + more), rng.choice((1, 20, 70))
    return dx.trained.NsaSizes(cmp_block, stride, slc_block, count, first, local, window, rng.choice(("sum", "max")))


def paged(rng, sizes, lengths, k, v):
    """Return a pool of pages in random order, NaN elsewhere, with (tokens, heads, dim) keys and values per sequence."""
    page_size = rng.choice(
        [size for size in (16, 32, 64) if sizes.slc_block % size == 0 and size % sizes.cmp_stride == 0]
    )
    most = -(-max(lengths) // page_size) + 1
    pages = torch.randperm(len(lengths) * most + 2)[: len(lengths) * most].view(len(lengths), most).int()
    pool = [
        torch.full((len(lengths) * most + 2, page_size, *x[0].shape[1:]), torch.nan, dtype=x[0].dtype) for x in (k, v)
    ]
    for b, length in enumerate(lengths):
        for position in range(length):
            where = pages[b, position // page_size], position % page_size
            pool[0][where], pool[1][where] = k[b][position], v[b][position]
    used = torch.tensor(lengths, dtype=torch.int32)
    return dx.PagedCache(*(x.to(DEVICE) for x in pool), used.to(DEVICE), pages.to(DEVICE))


def problem(seed, group, dtype=torch.float32):
    """Return sequences, the training result for each of their tokens, and the weights of their compression."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes, heads = random_sizes(rng), rng.choice((1, 2))
    lengths = [
        rng.choice((1, 7, 33, 40) if INTERPRETED else (1, 7, 33, 64, 90, 130)) for _ in range(rng.choice((1, 3)))
    ]
    dim, dim_v = rng.choice(((16, 16), (24, 16)))
    draw = lambda n, *shape: torch.randn(n, *shape).to(dtype)
    k, v = [draw(n, heads, dim) for n in lengths], [draw(n, heads, dim_v) for n in lengths]
    q, gates = (
        [draw(n, heads * group, dim) for n in lengths],
        [torch.rand(n, heads * group, 3).to(dtype) for n in lengths],
    )
    weight = torch.rand(sizes.cmp_block, heads).to(dtype) if rng.random() < 0.5 else None
    want = []
    for parts in zip(q, k, v, gates, strict=True):
        a, b, c, g = (x[None] for x in parts)
        pooled = dx.trained.compress(b, sizes, weight), dx.trained.compress(c, sizes, weight)
        want.append(dx.trained.native_sparse_attention(a, b, c, pooled, g, sizes, scale=0.3, backend="cpu")[0])
    how = (
        weight
        if weight is None or seed % 2
        else lambda windows: torch.einsum("wlhd,lh->whd", windows, weight.to(windows))
    )
    return rng, sizes, lengths, q, k, v, gates, how.to(DEVICE) if isinstance(how, torch.Tensor) else how, want


@pytest.mark.slow  # fingerprints show that kernels are those that passed
@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("group", GROUPS)
def test_each_step_is_the_training_forward(group):
    """Ragged lengths, any group, overlapping windows; keys arrive one by one near the end of each sequence."""
    rng, sizes, lengths, q, k, v, gates, how, want = problem(group, group)
    cache = paged(rng, sizes, lengths, k, v)
    full = cache.seqused_k.clone()
    begin = [max(0, n - STEPS) for n in lengths]
    cache.seqused_k.copy_(torch.tensor(begin))
    cache = dx.trained.compress_pages(cache, sizes, how, how, backend=BACKEND)
    for _ in range(STEPS):
        cache.seqused_k.copy_(torch.minimum(cache.seqused_k + 1, full))
        dx.trained.compress_pages(cache, sizes, how, how, new_tokens=1, backend=BACKEND)
        at = [int(n) - 1 for n in cache.seqused_k]
        pick = lambda parts: torch.stack([x[t] for x, t in zip(parts, at, strict=True)])[:, None].to(DEVICE)  # noqa: B023
        out, blocks = dx.trained.nsa_decode(pick(q), cache, pick(gates), scale=0.3, backend=BACKEND)
        assert torch.allclose(out, pick(want), atol=2e-5), (at, sizes)
        assert blocks.shape == (len(lengths), 1, k[0].shape[1], sizes.slc_count)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_several_queries_at_once(seed):
    rng, sizes, lengths, q, k, v, gates, how, want = problem(100 + seed, rng_group(seed))
    steps = min(5, *lengths)
    cache = dx.trained.compress_pages(paged(rng, sizes, lengths, k, v), sizes, how, how, backend=BACKEND)
    last = lambda parts: torch.stack([x[-steps:] for x in parts]).to(DEVICE)
    out = dx.trained.nsa_decode(last(q), cache, last(gates), scale=0.3, backend=BACKEND).out
    assert torch.allclose(out, last(want), atol=2e-5)


def rng_group(seed):
    return (1, 2, 4, 7, 8, 16, 32, 5)[seed % 8]


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_contiguous_cache(seed):
    sizes = problem(seed, 2)[1]
    batch, tokens, heads = 2, 75, 2
    k, v, q = torch.randn(batch, tokens, heads, 16), torch.randn(batch, tokens, heads, 16), torch.randn(batch, 1, 4, 16)
    gates = torch.rand(batch, 1, 4, 3)
    k, v, q, gates = (x.to(DEVICE) for x in (k, v, q, gates))
    cache = dx.PagedCache.contiguous(k, v, page_size=sizes.slc_block)
    cache = dx.trained.compress_pages(cache, sizes, backend=BACKEND)
    pooled = dx.trained.compress(k, sizes), dx.trained.compress(v, sizes)
    want = dx.trained.native_sparse_attention(q, k, v, pooled, gates, sizes, backend="reference")
    assert torch.allclose(dx.trained.nsa_decode(q, cache, gates, backend=BACKEND).out, want, atol=2e-5)
    with pytest.raises(ValueError, match="page table"):
        dx.trained.nsa_decode(q.expand(-1, 2, -1, -1), cache, gates.expand(-1, 2, -1, -1), backend=BACKEND)


def test_a_fork_shares_whole_pages():
    """Two sequences share a prefix; its last page and compressed tokens are copied, and they continue differently."""
    sizes = dx.trained.NsaSizes(16, 8, 16, 3, 1, 1, window=20)
    prefix, more, heads = (45, 4, 2) if INTERPRETED else (40, 30, 2)  # past the end of the copied page
    draw = lambda n, width=16: torch.randn(n, heads, width)
    k, v = draw(prefix), draw(prefix)
    cache = dx.trained.compress_pages(paged(random.Random(0), sizes, [prefix], [k], [v]), sizes, backend=BACKEND)
    grow = lambda x: torch.cat([x, x.new_full((8, *x.shape[1:]), torch.nan)])
    kept = cache.compressed
    first_new, last = len(cache.k), int(cache.page_table[0, 2])
    cache = replace(cache, k=grow(cache.k), v=grow(cache.v), compressed=replace(kept, k=grow(kept.k), v=grow(kept.v)))
    for x in (cache.k, cache.v, cache.compressed.k, cache.compressed.v):  # the incomplete page
        x[first_new] = x[last]
    row = cache.page_table[0, :2].tolist()
    table = [
        [*row, last, *range(first_new + 1, first_new + 3)],
        [*row, first_new, *range(first_new + 3, first_new + 5)],
    ]
    used = torch.full((2,), prefix, dtype=torch.int32, device=DEVICE)
    cache = replace(cache, page_table=torch.tensor(table, dtype=torch.int32, device=DEVICE), seqused_k=used)
    own_k, own_v = ([torch.cat([x, draw(more)]) for _ in range(2)] for x in (k, v))
    q, gates = torch.randn(2, prefix + more, 4, 16), torch.rand(2, prefix + more, 4, 3)
    for at in range(prefix, prefix + more):
        for b in range(2):
            where = table[b][at // 16], at % 16
            cache.k[where], cache.v[where] = own_k[b][at].to(DEVICE), own_v[b][at].to(DEVICE)
        used += 1
        dx.trained.compress_pages(cache, new_tokens=1, backend=BACKEND)
        got = dx.trained.nsa_decode(
            q[:, at, None].to(DEVICE), cache, gates[:, at, None].to(DEVICE), backend=BACKEND
        ).out
        for b in range(2):
            x, y = own_k[b][None, : at + 1], own_v[b][None, : at + 1]
            pooled = dx.trained.compress(x, sizes), dx.trained.compress(y, sizes)
            want = dx.trained.native_sparse_attention(
                q[b, at, None][None], x, y, pooled, gates[b, at, None][None], sizes, backend="cpu"
            )
            assert torch.allclose(got[b].cpu(), want[0], atol=2e-5), (at, b)


def test_blocks_of_an_earlier_step():
    """Earlier blocks with the current forced blocks; selected again, they are exact."""
    sizes = dx.trained.NsaSizes(16, 8, 16, 4, 1, 1, window=20)
    k, v = torch.randn(200, 2, 16), torch.randn(200, 2, 16)
    cache = dx.trained.compress_pages(paged(random.Random(0), sizes, [200], [k], [v]), sizes, backend=BACKEND)
    q, gates = torch.randn(1, 1, 4, 16).to(DEVICE), torch.rand(1, 1, 4, 3).to(DEVICE)
    cache.seqused_k.fill_(190)
    then = dx.trained.nsa_decode(q, cache, gates, backend=BACKEND).block_indices
    same = dx.trained.nsa_decode(q, cache, gates, block_indices=then, backend=BACKEND)
    torch.testing.assert_close(same.out, dx.trained.nsa_decode(q, cache, gates, backend=BACKEND).out)
    cache.seqused_k.fill_(200)  # one block later
    now = dx.trained.nsa_decode(q, cache, gates, block_indices=then, backend=BACKEND)
    for head in range(2):
        kept = {int(j) for j in then[0, 0, head] if j >= 0} | {12}
        assert {int(j) for j in now.block_indices[0, 0, head] if j >= 0} == kept
    mask_keys = [[t for j in sorted(map(int, row[row >= 0])) for t in range(j * 16, min(200, j * 16 + 16))]
                 for row in now.block_indices[0, 0]]  # fmt: skip
    only = torch.zeros_like(gates)
    only[..., 1] = 1
    alone = dx.trained.nsa_decode(q, cache, only, block_indices=then, backend=BACKEND).out[0, 0].cpu()
    for head in range(4):
        keys = mask_keys[head // 2]
        weights = (k[keys, head // 2] @ q[0, 0, head].cpu() / 4).softmax(0)
        torch.testing.assert_close(alone[head], weights @ v[keys, head // 2], atol=1e-5, rtol=1e-5)


def test_saved_and_copied():
    sizes = dx.trained.NsaSizes(16, 8, 16, 3, 1, 1, window=20)
    k, v = torch.randn(60, 2, 16), torch.randn(60, 2, 16)
    cache = dx.trained.compress_pages(paged(random.Random(0), sizes, [60], [k], [v]), sizes, backend=BACKEND)
    q, gates = torch.randn(1, 1, 4, 16).to(DEVICE), torch.rand(1, 1, 4, 3).to(DEVICE)
    again = copy.deepcopy(cache)
    want = dx.trained.nsa_decode(q, cache, gates, backend=BACKEND).out
    cache.k.zero_()
    assert torch.equal(dx.trained.nsa_decode(q, again, gates, backend=BACKEND).out, want)


def test_no_keys_and_no_sequences():
    sizes = dx.trained.NsaSizes(16, 8, 16, 3, 1, 1, window=20)
    for batch in (0, 2):
        pool = torch.full((4, 16, 2, 16), torch.nan, device=DEVICE)
        used = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        cache = dx.PagedCache(pool, pool, used, torch.full((batch, 2), -1, dtype=torch.int32, device=DEVICE))
        cache = dx.trained.compress_pages(cache, sizes, backend=BACKEND)
        q, gates = torch.randn(batch, 1, 4, 16, device=DEVICE), torch.rand(batch, 1, 4, 3, device=DEVICE)
        out, blocks = dx.trained.nsa_decode(q, cache, gates, backend=BACKEND)
        assert (out == 0).all()
        assert (blocks == -1).all()


def test_bad_arguments():
    sizes = dx.trained.NsaSizes(16, 8, 16, 3, 1, 1, window=20)
    k = torch.randn(1, 32, 2, 16)
    cache = dx.PagedCache.contiguous(k, k, page_size=16)
    q, gates = torch.randn(1, 1, 4, 16), torch.rand(1, 1, 4, 3)
    with pytest.raises(ValueError, match="compressed tokens"):
        dx.trained.nsa_decode(q, cache, gates)
    with pytest.raises(ValueError, match="needs `sizes`"):
        dx.trained.compress_pages(cache)
    with pytest.raises(ValueError, match="must divide slc_block"):
        dx.trained.compress_pages(dx.PagedCache.contiguous(k, k, page_size=64), sizes)
    with pytest.raises(ValueError, match="16 bits or more"):
        dx.trained.compress_pages(dx.PagedCache.quantized(k, k, page_size=16), sizes)
    with pytest.raises(ValueError, match="leftpad_k"):
        dx.trained.compress_pages(replace(cache, leftpad_k=torch.ones(1, dtype=torch.int32)), sizes)
    made = dx.trained.compress_pages(cache, sizes)
    with pytest.raises(ValueError, match="must keep cmp_block"):
        dx.trained.compress_pages(made, replace(sizes, cmp_block=8))
    with pytest.raises(ValueError, match="`gates` must be"):
        dx.trained.nsa_decode(q, made, gates[..., :2])
    with pytest.raises(ValueError, match="`block_indices` must be"):
        dx.trained.nsa_decode(q, made, gates, block_indices=torch.zeros(1, 2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="match this cache"):
        replace(made, k=k[..., :8], v=k[..., :8])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("heads", [(64, 4), (32, 8), (8, 8)])
def test_a_captured_step_follows_the_lengths(heads):
    """bf16 and the paper's sizes against fp64 over the same blocks."""
    sizes, pages = dx.trained.NsaSizes(), 64
    q_heads, kv_heads = heads
    draw = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
    k, v, q = draw(2 * pages, 64, kv_heads, 128), draw(2 * pages, 64, kv_heads, 128), draw(2, 1, q_heads, 128)
    gates = torch.rand(2, 1, q_heads, 3, device=DEVICE, dtype=torch.bfloat16)
    used = torch.full((2,), pages * 64, device=DEVICE, dtype=torch.int32)
    table = torch.randperm(2 * pages, device=DEVICE).view(2, pages).int()
    cache = dx.trained.compress_pages(dx.PagedCache(k, v, used, table), sizes)

    def step():
        dx.trained.compress_pages(cache, new_tokens=1)
        return dx.trained.nsa_decode(q, cache, gates)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, blocks = step()
    for lengths in ([4096, 4095], [1, 0], [33, 65], [2000, 3071]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        wide = replace(
            cache, k=k.double(), v=v.double(),
            compressed=replace(cache.compressed, k=cache.compressed.k.double(), v=cache.compressed.v.double()),
        )  # fmt: skip
        exact = dx.trained.nsa_decode(q.double(), wide, gates.double(), block_indices=blocks, backend="reference").out
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
        mine = dx.trained.nsa_decode(q.double(), wide, gates.double(), backend="reference").block_indices
        differs = (mine.sort(-1).values != blocks.sort(-1).values).float().mean()
        assert differs < 0.2  # because of near ties
