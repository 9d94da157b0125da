# SPDX-License-Identifier: Apache-2.0
"""Cached launches give the same results as first launches, for other tensors."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dynaxx as dx
from dynaxx.kernels.registry import ATTENTION
from dynaxx.testing import make_qkv
from interpreter import HOPPER

BACKENDS = ("hopper", "triton") if HOPPER else ("triton",)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def inputs(seed=0, seqlen=300, heads=(4, 2), dtype=torch.bfloat16):
    return make_qkv(1, seqlen, seqlen, *heads, 64, dtype=dtype, device="cuda", seed=seed)


def window(seqlen=300):
    """Return a new layout, for which no launch is cached."""
    return dx.SlidingWindow(77).layout(seqlen, block_size=64).to("cuda")


def both_ways(q, k, v, layout, backend):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = dx.sparse_attention(q, k, v, layout, return_lse=True, backend=backend)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    return out, lse, *grads


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeats_are_launches_of_their_own_tensors(backend):
    layout = window()
    batches = [inputs(seed) for seed in range(4)]
    repeats = [both_ways(*batch, layout, backend) for batch in batches]
    for batch, repeat in zip(batches, repeats, strict=True):
        assert_same(repeat, both_ways(*batch, window(), backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_for_two_arguments(backend):
    layout = window()
    q, k, v = inputs()
    for keys, values in ((k, k), (k, v), (k, k)):
        assert_same(both_ways(q, keys, values, layout, backend), both_ways(q, keys, values, window(), backend))
        once = dx.sparse_attention(q, keys, values, layout, backend=backend)
        assert torch.equal(once, dx.sparse_attention(q, keys, values, window(), backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_differ_use_no_other_calls_launch(backend):
    """Other addresses, strides, dtypes, lengths or scales never use a launch cached for other inputs."""
    q, k, v = inputs()
    odd = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x) for x in (q, k, v)]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    layout = window()
    expected = both_ways(q, k, v, window(), backend)
    for batch in ((q, k, v), odd, turned, (q, odd[1], turned[2]), (q, k, v), odd, turned):
        assert_same(both_ways(*batch, layout, backend), expected)
    half = inputs(dtype=torch.float16)
    assert_same(both_ways(*half, layout, backend), both_ways(*half, window(), backend))
    for scale in (0.1, -0.1, 0.0, 0.1, 2.0):
        found = dx.sparse_attention(q, k, v, layout, scale=scale, backend=backend)
        assert torch.equal(found, dx.sparse_attention(q, k, v, window(), scale=scale, backend=backend))
    for seqlen in (1, 64, 301, 300):
        batch = inputs(seqlen=seqlen)
        again = window(seqlen)
        assert_same(both_ways(*batch, again, backend), both_ways(*batch, again, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_that_are_not_dense(backend):
    """A copy that one launch reads is not read by another launch."""
    q, k, v = inputs()
    dense = window()
    wide = torch.stack([dense.kv_indices, dense.kv_indices], 1)
    layout = dx.BlockLayout(
        300, 300, (64, 64), dense.kv_indptr, dense.kv_num_partial, wide[:, 0], dense.kv_masks, dense.masks
    )
    for _ in range(3):
        assert_same(both_ways(q, k, v, layout, backend), both_ways(q, k, v, dense, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_recordings_are_freed_with_their_layout(backend):
    layout = window()
    q, k, v = inputs()
    for _ in range(3):
        both_ways(q, k, v, layout, backend)
    tensors = [weakref.ref(q), weakref.ref(layout)]
    del layout, q, k, v
    gc.collect()
    assert [ref() for ref in tensors] == [None, None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_and_profilers(backend):
    from triton import knobs

    layout = window()
    q, k, v = inputs()
    expected = both_ways(q, k, v, layout, backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = both_ways(q, k, v, layout, backend)
    stream.synchronize()
    assert_same(on_stream, expected)
    seen = []
    hook = lambda metadata: seen.append(metadata.get()["name"])
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        for _ in range(3):
            ATTENTION.kernels(backend).attention_forward(q, k, v, layout, 0.1)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(seen) == 3
    assert len(set(seen)) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_at_a_time(backend):
    layout = window()
    batches = [inputs(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: both_ways(*batch, layout, backend), batches))
    for batch, results in zip(batches, found, strict=True):
        assert_same(results, both_ways(*batch, window(), backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_scales_than_are_kept(backend):
    layout = window()
    q, k, v = inputs()
    for i in range(80):
        found = dx.sparse_attention(q, k, v, layout, scale=0.1 + i / 100, backend=backend)
    assert torch.equal(found, dx.sparse_attention(q, k, v, window(), scale=0.1 + 79 / 100, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layout_that_moves_in_memory(backend):
    layout, held = window(), []
    q, k, v = inputs()
    expected = both_ways(q, k, v, layout, backend)
    for _ in range(2):
        held.append(layout.kv_indices.clone())
        moved = layout.kv_indices.clone()
        layout.kv_indices.fill_(0).set_(moved)
        assert_same(both_ways(q, k, v, layout, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_call_in_a_graph(backend):
    """Use compiled kernels with a layout and shapes for which nothing was launched before."""
    both_ways(*inputs(), window(), backend)
    layout = window()
    q, k, v = inputs(seed=5)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = dx.sparse_attention(q, k, v, layout, backend=backend)
    graph.replay()
    again = dx.sparse_attention(q, k, v, layout, backend=backend)
    assert torch.equal(out, again)
    assert torch.equal(again, dx.sparse_attention(q, k, v, window(), backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compile_serves_all_lengths(backend, monkeypatch):
    """Run forward and backward; the first lengths may specialize kernels: 1, 16 n, and others."""
    from triton import knobs

    compiled = []
    attend = lambda seqlen: both_ways(*inputs(seqlen=seqlen), window(seqlen), backend)
    for seqlen in (1, 320, 333):
        attend(seqlen)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]) and None)
    for seqlen in (2, 64, 100, 129, 1000, 2048):
        attend(seqlen)
    assert compiled == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_device_than_the_current_one(backend):
    layout = window()
    q, k, v = inputs()
    expected = both_ways(q, k, v, layout, backend)
    there = layout.to("cuda:1")
    for _ in range(2):
        found = both_ways(*(x.to("cuda:1") for x in (q, k, v)), there, backend)
        assert_same([x.to("cuda:0") for x in found], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_of_one_form(backend):
    """Selections of equal shapes share a cached launch, but never blocks, budget or batch of another call."""
    rules = [dx.Sink(64) | dx.TopK(2), dx.Sink(64) | dx.TopK(3), dx.Sink(64) | dx.TopK((1, 3, 2, 5))]
    results = []
    for seed in range(5):
        q, k, v = inputs(seed)
        for rule in rules:
            layout = dx.select_blocks(q, k, rule, block_size=64)
            results.append(((q, k, v), layout, both_ways(q, k, v, layout, backend)))
        both = [torch.cat([x, x.flip(1)]) for x in (q, k, v)]
        layout = dx.select_blocks(*both[:2], rules[0], block_size=64)
        results.append((both, layout, both_ways(*both, layout, backend)))
    assert len({layout.form for _, layout, _ in results}) == 4
    for batch, layout, found in results:
        alone = dx.BlockLayout(
            300,
            300,
            (64, 64),
            layout.kv_indptr,
            layout.kv_num_partial,
            layout.kv_indices,
            layout.kv_masks,
            layout.masks,
        )
        assert alone.form is None
        assert_same(found, both_ways(*batch, alone, backend))
