# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402, F401, F811 -- triton may be missing, and fixtures are imported
"""From the third run on, a list of several kernels launches a CUDA graph."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

from driver_standin import (
    INVALID_VALUE,
    LAUNCH_FAILED,
    Given,
    GraphStandIn,
    _simple,
    fresh,
    numbers,
    run,
    simple,
    standin,
)
from test_launcher import started

from dynaxx.kernels.runtime import launch_cache, launch_list, launcher
from dynaxx.kernels.runtime.launch_list import compiled_code


def three_kernels(given, x):
    between, out = torch.empty(2, 64), torch.empty(64)
    _simple[(1,)](x, given.k, between[0], BLOCK=64)
    _simple[(1,)](between[0], given.k, between[1], BLOCK=64)
    _simple[(1,)](between[1], given.k, out, BLOCK=64)
    return (out,)


with_graphs = pytest.mark.parametrize("standin", [GraphStandIn], indirect=True)


@with_graphs
def test_the_third_run_is_a_graph_with_parameters_of_its_own(fresh):
    for _ in range(3):
        run(three_kernels, torch.randn(64))
    assert len(fresh.launched) == 6  # the first call was recorded
    assert not fresh.graphs
    for _ in range(3):
        x, k = torch.randn(64), torch.randn(3, 64)
        (out,) = run(three_kernels, x, k=k)
        number, (first, second, third) = fresh.graphs[-1]
        assert number == 1
        assert first.stream == 7
        assert first.sizes == fresh.launched[0].sizes
        x_at, k_at, between, *scratch = numbers(first.parameters)
        assert (x_at, k_at, scratch) == (x.data_ptr(), k.data_ptr(), [0, 0])
        assert numbers(second.parameters)[:3] == [between, k.data_ptr(), between + 256]
        assert numbers(third.parameters)[:3] == [between + 256, k.data_ptr(), out.data_ptr()]
    assert len(fresh.launched) == 6
    assert (len(fresh.graphs), len(fresh.made), fresh.modes) == (3, 1, [2, 0])
    launch_cache.recordings.clear()
    assert fresh.destroyed == [2001, 1001]


@with_graphs
def test_runs_that_are_captured_or_few_or_on_other_streams_launch_kernels(fresh):
    for _ in range(5):
        run(simple, torch.randn(64))
    assert not fresh.made  # one kernel
    fresh.launched.clear()
    fresh.capturing = 1
    for _ in range(5):
        run(three_kernels, torch.randn(64))
    assert (len(fresh.launched), fresh.made) == (12, [])
    fresh.capturing = 0
    for _ in range(4):
        run(three_kernels, torch.randn(64))
    assert (len(fresh.launched), len(fresh.graphs)) == (18, 2)
    kept = list(launch_cache.recordings.values())[-1]
    addresses = [torch.randn(64).data_ptr() for _ in range(4)]
    for i in range(40):  # two streams in turns: the graph stays with one
        assert kept.launches.run(7 + 4 * (i % 2), addresses, [])
    assert (len(fresh.launched), len(fresh.graphs)) == (78, 22)
    for _ in range(20):  # it follows a stream that is used alone
        assert kept.launches.run(11, addresses, [])
    assert (len(fresh.launched), len(fresh.graphs)) == (78 + 45, 27)
    assert fresh.graphs[-1][1][0].stream == 11
    compiled_code().use_graphs(False)
    try:
        assert kept.launches.run(11, addresses, [])
    finally:
        compiled_code().use_graphs(True)
    assert (len(fresh.launched), len(fresh.graphs)) == (78 + 48, 27)


@with_graphs
@pytest.mark.parametrize("function", ["is_capturing", "exchange_mode", "create", "add", "instantiate", "set"])
def test_without_a_graph_kernels_are_launched(fresh, function):
    fresh.fails[function] = INVALID_VALUE
    for _ in range(6):
        (out,) = run(three_kernels, torch.randn(64))
    assert numbers(fresh.launched[-1].parameters)[2] == out.data_ptr()
    assert len(fresh.launched) == (12 if function == "set" else 15)  # the graph was launched once, when it was made
    assert len(fresh.graphs) == (1 if function == "set" else 0)
    assert len(fresh.modes) % 2 == 0


@with_graphs
def test_errors_of_a_launched_graph(fresh):
    for _ in range(4):
        run(three_kernels, torch.randn(64))
    fresh.fails["launch_graph"] = LAUNCH_FAILED
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        run(three_kernels, torch.randn(64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_launch_on_a_gpu(kept, monkeypatch):
    monkeypatch.setenv(launch_list.ENVIRONMENT, "1")
    k = torch.randn(3, 64, device="cuda")
    add = launcher.kernel_launcher(triton.jit(_simple.fn))

    def call(given, x):
        between, out = torch.empty(2, 64, device="cuda"), torch.empty(64, device="cuda")
        add[(1,)](x, given.k, between[0], BLOCK=64)
        add[(1,)](between[0], given.k, between[1], BLOCK=64)
        add[(1,)](between[1], given.k, out, BLOCK=64)
        return (out,)

    repeated = lambda x: launch_cache.record_or_replay(call, Given(k), (x,), at_once=True)[0]
    check = lambda found, x: torch.testing.assert_close(found, x + 3 * k[0])
    xs = [torch.randn(64, device="cuda") for _ in range(300)]
    for out, x in zip([repeated(x) for x in xs], xs, strict=True):  # nothing waits in between
        check(out, x)
    captured, given = torch.cuda.CUDAGraph(), torch.zeros(64, device="cuda")
    with torch.cuda.graph(captured):
        found = [repeated(given), repeated(given)]
    for x in xs[:3]:
        given.copy_(x)
        captured.replay()
        check(found[0], x)
        check(found[1], x)

    def work(i):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            return [repeated(x) for x in xs[i::4]]

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        outs = list(threads.map(work, range(4)))
    torch.cuda.synchronize()
    for i in range(4):
        for out, x in zip(outs[i], xs[i::4], strict=True):
            check(out, x)
    assert all(each.launches is not None for each in launch_cache.recordings.values())
