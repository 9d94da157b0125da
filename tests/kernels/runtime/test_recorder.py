# SPDX-License-Identifier: Apache-2.0
"""`record_or_replay`: the second call of a kind repeats the launches of the first one, on its own tensors."""

import gc
import os
import struct
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

import triton.language as tl  # noqa: E402
from driver_standin import CALLS, numbers, standin  # noqa: E402, F401
from test_launcher import _kernel as of_descriptors  # noqa: E402
from test_launcher import address, started  # noqa: E402, F401
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import dynaxx as dx  # noqa: E402
from dynaxx.kernels.runtime import launch_cache  # noqa: E402
from dynaxx.kernels.runtime.launcher import kernel_launcher  # noqa: E402
from dynaxx.layout.paging import quantize_pages  # noqa: E402

FIRST = 9  # position of the first argument of the kernel: after grid, stream, function, metadata and hooks
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@kernel_launcher
@triton.jit(do_not_specialize=["count"])
def _kernel(p_x, p_y, p_out, count, scale, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(p_x + at), tl.load(p_y + at)
    tl.store(p_out + at, x * scale + y, mask=at < count)


def small_cache(k=None, v=None):
    k, v = (torch.randn(1, 64, 1, 64) if x is None else x for x in (k, v))
    return dx.PagedCache(k, v, torch.tensor([64], dtype=torch.int32), page_size=64)


def two_launches(cache, x, scale):
    """Allocate memory between two kernels and pass a view of it, and a view of v, to the second one."""
    between, out = torch.empty(2, 64), x.new_empty(64)
    _kernel[(1,)](x, cache.k, between[1], count=64, scale=scale, BLOCK=64)
    _kernel[(1,)](between[1], cache.v[0, 0, :, 32:], out, count=64, scale=1.0, BLOCK=64)
    return (out,)


def first_pointers(standin, cache, x):  # noqa: F811
    """Return the addresses that the first kernel of a call was started with."""
    CALLS.clear()
    standin.launched.clear()
    launch_cache.record_or_replay(two_launches, cache, (x,), 0.5)
    if standin.launched:
        return numbers(standin.launched[0].parameters)
    return [address(given) for given in CALLS[0][FIRST:]]


def counted(kept):
    return sum(value not in (launch_cache.CALLED_ONCE, launch_cache.NOT_REPLAYABLE) for value in kept.values())


def test_the_same_launches_over_other_tensors(standin, kept):  # noqa: F811
    for turn in range(4):
        cache, x = small_cache(), torch.randn(64)
        standin.launched.clear()
        (out,) = launch_cache.record_or_replay(two_launches, cache, (x,), 0.5)
        assert (len(CALLS), len(standin.launched)) == (min(2 * turn + 2, 4), 0 if turn < 2 else 2)
    first, second = (each.parameters for each in standin.launched)
    x_at, k_at, between, count = numbers(first)[:4]
    assert (x_at, k_at, count) == (x.data_ptr(), cache.k.data_ptr(), 64)
    assert numbers(second)[:4] == [between, cache.v.data_ptr() + 128, out.data_ptr(), 64]
    assert [struct.unpack("=f", each[4])[0] for each in (first, second)] == [0.5, 1.0]
    assert out.shape == (64,)
    assert counted(kept) == 1


def test_another_form_is_another_call(standin, kept):  # noqa: F811
    memory = torch.randn(200)
    for x in [torch.randn(64), torch.randn(128)[::2], memory[1:65], memory[2:66], memory[:64], torch.randn(64)] * 3:
        assert first_pointers(standin, small_cache(), x)[0] == x.data_ptr()
    launch_cache.record_or_replay(two_launches, small_cache(), (x,), 0.25)
    assert len(kept) == 5
    assert counted(kept) == 4


def test_two_tensors_that_are_one_are_not_what_is_kept(standin, kept):  # noqa: F811
    cache, x = small_cache(), torch.randn(64)
    both = small_cache(cache.k, cache.k)
    for _ in range(3):
        launch_cache.record_or_replay(two_launches, both, (x,), 0.5)
    assert counted(kept) == 0
    for each in (cache, both, cache):
        assert first_pointers(standin, each, x)[1] == each.k.data_ptr()
    assert counted(kept) == 1


def computes(cache, x, scale):
    return two_launches(cache, x * 2, scale)


def reads_back(cache, x, scale):
    return two_launches(cache, x, float(x[0]))


def reads_others(cache, x, scale):
    return two_launches(replace(cache, k=OTHER), x, scale)


def returns_a_view(cache, x, scale):
    return (two_launches(cache, x, scale)[0][1:],)


def returns_what_was_given(cache, x, scale):
    two_launches(cache, x, scale)
    return (x,)


def launches_nothing(cache, x, scale):
    return (torch.empty(3),)


def writes(cache, x, scale):
    return two_launches(cache, x.clone().fill_(scale), scale)


OTHER = torch.randn(1, 64, 1, 64)


@pytest.mark.parametrize(
    "call", [computes, reads_back, reads_others, returns_a_view, returns_what_was_given, launches_nothing, writes]
)
def test_calls_that_do_more_than_launch_are_not_replayed(call, standin, kept):  # noqa: F811
    counts = []
    for _ in range(3):
        CALLS.clear()
        launch_cache.record_or_replay(call, small_cache(), (torch.randn(64),), 0.5)
        counts.append(len(CALLS))
    assert set(kept.values()) == {launch_cache.NOT_REPLAYABLE}
    assert counts == [counts[0]] * 3


def test_inference_mode_and_calls_within_calls(standin, kept):  # noqa: F811
    def outer(cache, x, scale):
        return launch_cache.record_or_replay(two_launches, cache, (x.contiguous().to(torch.float32),), scale)

    for _ in range(3):
        with torch.inference_mode():
            launch_cache.record_or_replay(outer, small_cache(), (torch.randn(64),), 0.5)
    assert (len(CALLS), len(standin.launched)) == (4, 2)
    assert counted(kept) == 1


def test_nothing_is_kept_alive(standin, kept):  # noqa: F811
    cache, x = small_cache(), torch.randn(64)
    for _ in range(2):
        (out,) = launch_cache.record_or_replay(two_launches, cache, (x,), 0.5)
    refs = [weakref.ref(each) for each in (cache, cache.k, x, out)]
    del cache, x, out
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


def test_no_more_than_so_many(standin, kept, monkeypatch):  # noqa: F811
    monkeypatch.setattr(launch_cache, "MAX_CALLS", 3)
    for i in range(10):
        launch_cache.record_or_replay(two_launches, small_cache(), (torch.randn(64),), float(i))
    assert 0 < len(kept) <= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_every_part_of_a_step_is_kept(dtype, standin, kept):  # noqa: F811
    from dynaxx.kernels.decode.triton import launch as decode

    k, v = torch.randn(2, 1, 128, 1, 32).to(torch.bfloat16)
    cache = dx.PagedCache.contiguous(k, v) if dtype == torch.bfloat16 else dx.PagedCache.quantized(k, v, dtype)
    cache = dx.summarize_pages(cache, backend="reference")
    q, budget = torch.randn(1, 1, 2, 32).to(torch.bfloat16), dx.PageBudget(0.2)
    wanted, pages = budget.wanted(1, cache.device), torch.zeros(1, 1, 1, dtype=torch.int32)
    for _ in range(3):
        decode.summarize_pages(cache, cache.summaries, 1)
        decode.select_pages(q, cache, wanted, 0, 1, 2, 0.1)
        decode.select_and_attend(q, cache, wanted, 0, 1, 2, 0.1)
        decode.attend_pages(q, cache, pages, None, 0.1)
        decode.attend_pages(q, cache, None, None, 0.1)
    assert counted(kept) == 5
    grids = [each[:3] for each in CALLS]
    assert grids[: len(grids) // 2] == grids[len(grids) // 2 :] == [tuple(each.sizes[:3]) for each in standin.launched]


def case(seed=0, batch=2, seqlen=700, dtype=torch.bfloat16, paged=False, exact=False, seqlen_q=1, bound=1.0, shift=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=gen, device="cuda", dtype=torch.bfloat16)
    lengths = torch.empty(batch + shift, dtype=torch.int32, device="cuda")[shift:]
    lengths.copy_(torch.tensor([seqlen, 77][:batch]))
    k, v = draw(batch, 704, 2, 64), draw(batch, 704, 2, 64)
    q = draw(batch, seqlen_q, 8, 64)
    if dtype.itemsize == 1 and exact:
        cache = dx.PagedCache.quantized(k, v, dtype, seqused_k=lengths)
    else:
        scales = {}
        if dtype.itemsize == 1:
            (k, k_scale), (v, v_scale) = (quantize_pages(x, dtype, 64) for x in (k, v))
            scales = {"k_scale": k_scale, "v_scale": v_scale}
        cache = dx.PagedCache(k.to(dtype), v.to(dtype), lengths, page_size=64, **scales)
    if paged:
        pages = torch.randperm(batch * 11, device="cuda", generator=gen)
        scatter = lambda x: torch.empty_like(x).index_copy_(0, pages, x)
        flat = lambda x: scatter(x.unflatten(1, (11, 64)).flatten(0, 1))
        cache = dx.PagedCache(flat(cache.k), flat(cache.v), lengths, pages.view(batch, 11).int())
    return q, dx.summarize_pages(cache, bound=bound, backend="reference")


CASES = {
    "contiguous": {},
    "paged": {"paged": True},
    "mean": {"bound": 0.0},
    "fp8": {"dtype": torch.float8_e4m3fn},
    "int8, exact tokens": {"dtype": torch.int8, "exact": True},
    "several queries": {"seqlen_q": 3},
    "lengths that do not begin at 16 bytes": {"shift": 1},
}


def everything(q, cache):
    """Run everything that a step of `sparse_decode` needs, after updating the summaries."""
    budget = dx.PageBudget(0.2, sinks=1, window=64, bound=cache.summaries.bound)
    cache = dx.summarize_pages(cache, new_tokens=1)
    pages = dx.select_pages(q, cache, budget)
    found = (pages, *dx.sparse_decode(q, cache, budget, return_lse=True), *dx.sparse_decode(q, cache, return_lse=True))
    return (
        *found,
        *dx.sparse_decode(q, cache, pages, return_lse=True),
        *dx.sparse_decode(q, cache, budget, scale=-0.1),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.gpu
@needs_gpu
def test_repeats_give_what_first_calls_give(name, kept):
    inputs = [case(seed, seqlen=600 + 10 * seed, **CASES[name]) for seed in range(4)]
    repeats = [everything(*each) for each in inputs]
    assert counted(kept) >= 5
    for each, repeat in zip(inputs, repeats, strict=True):
        kept.clear()
        for a, b in zip(repeat, everything(*each), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@needs_gpu
def test_repeats_in_threads_streams_and_graphs(kept):
    inputs = [case(seed) for seed in range(8)]
    expected = [everything(*each) for each in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: everything(*each), inputs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found += [everything(*inputs[0])]
    stream.synchronize()
    kept.clear()
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = everything(*inputs[0])
        graph.replay()
        found += [[x.clone() for x in outs]]
    for a, b in zip(found, [*expected, *[expected[0]] * 4], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(kept):
    q, cache = case()
    expected = dx.sparse_decode(q, cache)
    move = lambda x: x.to("cuda:1")
    there = dx.PagedCache(move(cache.k), move(cache.v), move(cache.seqused_k), page_size=64)
    for _ in range(3):
        assert torch.equal(dx.sparse_decode(q.to("cuda:1"), there).cuda(), expected)


class Growing(NamedTuple):
    """Inputs whose stride differs between calls of one form."""

    k: torch.Tensor
    form: str = "growing"

    @property
    def kernel_inputs(self):
        return (self.k,)


def test_sizes_of_a_call(standin, kept, monkeypatch):  # noqa: F811
    kernel = kernel_launcher(triton.jit(of_descriptors.fn, do_not_specialize=["count"]))  # not cached for others

    def call(cache, x):
        between, out = torch.empty(1, 64), torch.empty(64)
        for each in (x, between):
            descriptor = TensorDescriptor(each, [1, 64], [64, 1], [1, 64])
            stride = cache.k.stride(0)
            kernel[(3, 2)](descriptor, out, cache.k, count=64, stride=stride, scale=0.5, BIASED=True, BLOCK=64)
        return (out,)

    for width in (24, 40, 56, 24, 32, 48, 32):  # multiples of 16 are another form
        cache, x = Growing(torch.randn(64, width)), torch.randn(1, 64)
        standin.launched.clear()
        (out,) = launch_cache.record_or_replay(call, cache, (x,), at_once=True, sizes={"stride": width})
        if width in (24, 32) and not standin.launched:
            continue  # recorded
        first, second = (each.parameters for each in standin.launched)
        assert struct.unpack("=Q", first[0][:8])[0] == x.data_ptr()
        for each in (first, second):
            assert numbers(each)[4:8] == [out.data_ptr(), cache.k.data_ptr(), 64, width]
    assert counted(kept) == 2
    before = len(kept)
    launch_cache.record_or_replay(call, Growing(torch.randn(64, 24)), (x,), at_once=True, sizes={"stride": 2**31})
    assert len(kept) == before  # goes through Triton
    kept.clear()
    launch_cache.record_or_replay(call, Growing(torch.randn(64, 24)), (x,), at_once=True, sizes={"stride": 25})
    assert set(kept.values()) == {launch_cache.NOT_REPLAYABLE}  # the call has another size
