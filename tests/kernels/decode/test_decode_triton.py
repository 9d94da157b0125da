# SPDX-License-Identifier: Apache-2.0
"""The decode kernels against the definition: under Triton's interpreter on a CPU, and on a GPU if there is one."""

import random
from dataclasses import replace

import pytest
import torch
from test_decode import check_attention, check_smaller_pages, check_summaries, queries, random_cache, random_pages

import dynaxx as dx
from dynaxx.layout.paging import ExactTokens, quantize_pages
from interpreter import DEVICE, on_gpu, run_interpreted, runs_here, starts_interpreter

pytest.importorskip("triton")
DTYPES = (torch.float32, torch.float16, torch.int8) if DEVICE == "cpu" else (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
)  # fmt: skip
QUERY_DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.bfloat16, torch.float16)


def to_device(cache, device=DEVICE):
    """Copy a cache to the device, preserving the memory order of its views."""
    names = ("k", "v", "seqused_k", "page_table", "leftpad_k", "k_scale", "v_scale")
    tensors = {name: getattr(cache, name) for name in names}
    return replace(cache, **{name: None if x is None else x.to(device) for name, x in tensors.items()})


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


@runs_here
@pytest.mark.parametrize("seed", range(8 if DEVICE == "cpu" else 16))
def test_random_caches(seed):
    small = {"page_size": (16, 8, 128, 32)[seed // 2 % 4], "head_dim": (16, 24)[seed % 2], "batch": 2, "kv_heads": 1}
    cache, rng, gen = random_cache(1000 + seed, dtype=DTYPES[seed % len(DTYPES)], **(small if DEVICE == "cpu" else {}))
    q = queries(cache, rng, gen, rng.choice(QUERY_DTYPES))
    pages = random_pages(cache, gen) if seed % 3 else None
    move = lambda x: None if x is None else x.to(DEVICE)
    check_attention(move(q), to_device(cache), move(pages), "triton")


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_chunk_of_queries(dtype):
    """Use more rows than one program processes, for attention and for the selection."""
    gen = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 250, 2, 16, generator=gen)
    scales = {}
    if dtype == torch.int8:
        (k, k_scale), (v, v_scale) = (quantize_pages(x, dtype, 16) for x in (k, v))
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    cache = dx.PagedCache(k, v, torch.tensor([243], dtype=torch.int32), page_size=16, **scales)
    cache = dx.summarize_pages(to_device(cache), backend="reference")
    q = torch.randn(1, 45, 6, 16, generator=gen).to(DEVICE)
    pages = dx.select_pages(q, cache, dx.PageBudget(0.4), backend="triton")
    assert (pages >= 0).sum(-1).tolist() == [[11, 11]]  # 7 of 16, and the 4 that contain the queries
    check_attention(q, cache, pages, "triton")


@runs_here
@pytest.mark.parametrize("tokens_first", [True, False])
def test_smaller_pages(tokens_first):
    check_smaller_pages(tokens_first, "triton", DEVICE)


@runs_here
@pytest.mark.parametrize("seed", range(8))
def test_random_choices(seed):
    """Scores are small integers, so nothing is rounded and even ties select the same pages."""
    cache, rng, gen = random_cache(seed, page_size=16, head_dim=16)
    k = torch.randint(-2, 3, cache.k.shape, generator=gen).float()
    cache = to_device(dx.PagedCache(k, k, cache.seqused_k, cache.page_table, 16, cache.leftpad_k))
    cache = dx.summarize_pages(cache, dtype=rng.choice((None, torch.bfloat16)), backend="reference")
    q = torch.randint(-3, 4, (cache.batch, 2, cache.kv_heads * 3, 16), generator=gen).float().to(DEVICE)
    share = rng.choice((0, 1, 3, 0.0, 0.2, 0.5, tuple(rng.choice((0.1, 2)) for _ in range(cache.kv_heads))))
    budget = dx.PageBudget(share, sinks=rng.choice((0, 1, 40)), window=rng.choice((1, 30)))
    wanted = dx.select_pages(q, cache, budget, scale=1.0, backend="reference")
    assert torch.equal(dx.select_pages(q, cache, budget, scale=1.0, backend="triton"), wanted)
    mine = dx.sparse_decode(q, cache, budget, scale=1.0, backend="triton")
    torch.testing.assert_close(mine, dx.sparse_decode(q, cache, wanted, scale=1.0, backend="reference"))


@runs_here
def test_several_programs_score_a_list_of_many_pages():
    """Lists enough for one program each, but with too many pages for one."""
    gen = torch.Generator().manual_seed(0)
    batch, pages = (2, 1100) if DEVICE == "cpu" else (64, 2064)
    k = torch.randint(-2, 3, (batch, pages, 2, 16), generator=gen).float().to(DEVICE)
    used = torch.randint(pages // 2, pages, (batch,), generator=gen, dtype=torch.int32).to(DEVICE)
    cache = dx.summarize_pages(dx.PagedCache.contiguous(k, k, page_size=1, seqused_k=used), backend="reference")
    q = torch.randint(-3, 4, (batch, 1, 4, 16), generator=gen).float().to(DEVICE)
    budget = dx.PageBudget(0.1, sinks=1, window=5)
    wanted = dx.select_pages(q, cache, budget, scale=1.0, backend="reference")
    assert torch.equal(dx.select_pages(q, cache, budget, scale=1.0, backend="triton"), wanted)


@runs_here
@pytest.mark.parametrize("bound", [0.0, 0.5, 1.0])
def test_summaries(bound):
    for seed, dtype in enumerate(DTYPES):
        rng = random.Random(seed)
        cache, *_ = random_cache(seed, dtype=dtype, page_size=16, head_dim=24)
        cache = to_device(cache)
        for stored in (torch.int8, torch.float32):
            check_summaries(cache, bound, stored, "triton")
        mine = dx.summarize_pages(cache, bound=bound, backend="triton")
        before = mine.summaries.low.clone()
        dx.summarize_pages(mine, new_tokens=rng.choice((0, 1, 20)), backend="triton")
        assert torch.equal(mine.summaries.low, before)


@pytest.mark.gpu
@on_gpu
def test_a_captured_graph_follows_the_lengths():
    k = torch.randn(4, 2048, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(4, 1, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    used = torch.full((4,), 2048, device=DEVICE, dtype=torch.int32)
    cache = dx.summarize_pages(dx.PagedCache.contiguous(k, k, seqused_k=used))
    budget = dx.PageBudget(0.2, sinks=4, window=64)

    def step():
        dx.summarize_pages(cache, new_tokens=1)
        return dx.sparse_decode(q, cache, budget)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([2048, 1, 0, 700], [65, 64, 63, 1000], [3, 2000, 5, 129]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, step())
        chosen = dx.select_pages(q, cache, budget)
        wide = dx.PagedCache.contiguous(k.double(), k.double(), seqused_k=used)
        exact = dx.sparse_decode(q.double(), wide, chosen, backend="reference")
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_captured_graph_follows_exact_tokens(dtype):
    """Capture a step that writes its token, grows and decodes, and replay it past the end of the window."""
    k, v = torch.randn(2, 4, 2048, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(4, 1, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    used = torch.full((4,), 100, device=DEVICE, dtype=torch.int32)
    cache = dx.summarize_pages(dx.PagedCache.quantized(k, v, dtype, seqused_k=used))
    assert cache.seqused_k.data_ptr() == used.data_ptr()
    budget = dx.PageBudget(0.2, sinks=4, window=64)
    entry = torch.arange(4, device=DEVICE)

    def step():
        used.add_(1)
        last = (used - 1).long()
        cache.exact.write(k[entry, last][:, None], v[entry, last][:, None], used)
        dx.summarize_pages(cache, new_tokens=1)
        return dx.sparse_decode(q, cache, budget)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([2000, 1, 0, 700], [64, 60, 3, 30]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        started = ExactTokens.of(k, v, used)
        cache.exact.k.copy_(started.k)
        cache.exact.v.copy_(started.v)
        dx.summarize_pages(cache)
        for _ in range(40):
            graph.replay()
            fresh = replace(cache, exact=ExactTokens.of(k, v, used))
            assert torch.equal(out, dx.sparse_decode(q, fresh, budget))
        assert used.tolist() == [length + 40 for length in lengths]
        exact = dx.sparse_decode(q.double(), fresh, dx.select_pages(q, fresh, budget), backend="reference")
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


@runs_here
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bound", [0.5, 0.0])
def test_several_layers_in_one_launch(dtype, bound):
    """Layers whose caches differ in addresses: the summaries of each are those of its own launch."""
    from dynaxx.kernels.decode.triton.launch import summarize_layers
    from dynaxx.kernels.decode.triton.pages import layer_offsets

    draw = torch.Generator().manual_seed(0)
    table = torch.randperm(12, generator=draw).int().view(2, 6).to(DEVICE)
    used = torch.tensor([91, 18], dtype=torch.int32, device=DEVICE)
    layers = []
    for _ in range(3):
        k = torch.randn(12, 16, 2, 24, generator=draw)
        scales = {}
        if dtype.itemsize == 1:
            k, scale = quantize_pages(k, dtype, 16)
            scales = {"k_scale": scale.to(DEVICE).squeeze(1), "v_scale": scale.to(DEVICE).squeeze(1)}
        k = k.to(DEVICE, dtype)
        layers.append(dx.PagedCache(k, k, used, table, **scales))
    layers = [dx.summarize_pages(layer, bound=bound, backend="reference") for layer in layers]
    fresh = [(layer.summaries.low.clone(), layer.summaries.scale.clone()) for layer in layers]
    for layer in layers:
        layer.summaries.low.zero_(), layer.summaries.high.zero_(), layer.summaries.scale.zero_()
    offsets = layer_offsets(layers)
    summarize_layers(layers[0], offsets, 100)
    for layer, (low, scale) in zip(layers, fresh, strict=True):
        here = torch.cat([table[0], table[1, :2]]).long()
        torch.testing.assert_close(layer.summaries.scale[here], scale[here])
        assert (layer.summaries.low[here].int() - low[here].int()).abs().max() <= 1
        assert not layer.summaries.low[table[1, 2:].long()].any()
    assert layer_offsets([layers[0], replace(layers[1], page_table=table[:, :4])]) is None
