# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402, F401, F811 -- triton may be missing, and fixtures are imported
"""A list launches what Triton's launchers launch; a stand-in for the CUDA driver reads its packed parameters."""

import os
import struct

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

import triton.language as tl
from driver_standin import CALLS, INVALID_VALUE, LAUNCH_FAILED, Given, StandIn, fresh, numbers, run, simple, standin
from driver_standin import _simple as add_kernel
from test_launcher import Driver, Strides, Tables, _kernel_of_values, started
from test_launcher import _kernel as of_descriptors
from triton.tools.tensor_descriptor import TensorDescriptor

import dynaxx as dx
from dynaxx.kernels.runtime import launch_cache, launch_list, launcher, recorder
from dynaxx.ops.prepared.layer import LayerReplay, form_of_call


def test_pointers_offsets_and_numbers(standin):
    kernel = launcher.kernel_launcher(triton.jit(_kernel_of_values.fn))

    def call(given, x):
        between, out = torch.empty(2, 64), torch.empty(64)
        kernel[(3, 2)](Tables(x, given.k[1]), Strides(1, 3), between[1], BLOCK=64, num_warps=8)
        kernel[(5,)](Tables(between[1], given.k[2]), Strides(16, 3), out, BLOCK=64)
        return (out,)

    run(call, torch.randn(64))
    assert not standin.launched
    recorded = len(CALLS)
    for _ in range(2):
        x, k = torch.randn(64), torch.randn(3, 64)
        standin.launched.clear()
        (out,) = run(call, x, k=k)
        first, second = standin.launched
        assert (first.sizes[:6], second.sizes[:6]) == ([3, 2, 1, 256, 1, 1], [5, 1, 1, 128, 1, 1])
        assert first.stream == second.stream == 7
        assert first.attributes == second.attributes == []
        x_at, k_at, stride, between, *scratch = numbers(first.parameters)  # a stride of 1 is a constant
        assert (x_at, k_at, stride, scratch) == (x.data_ptr(), k.data_ptr() + 256, 3, [0, 0])
        assert numbers(second.parameters) == [between, k.data_ptr() + 512, 16, 3, out.data_ptr(), 0, 0]
    assert len(CALLS) == recorded  # nothing went through Triton


def test_tensor_maps_and_sizes(standin):
    kernel = launcher.kernel_launcher(triton.jit(of_descriptors.fn, do_not_specialize=["count"]))

    def call(given, x, scale):
        out = torch.empty(64)
        described, stride = TensorDescriptor(x, [1, 64], [64, 1], [1, 64]), given.k.stride(0)
        kernel[(1,)](described, out, given.k, count=63, stride=stride, scale=scale, BIASED=True, BLOCK=64)
        return (out,)

    sized = lambda x, width: launch_cache.record_or_replay(
        call, Given(torch.randn(64, width)), (x,), 0.375, at_once=True, sizes={"stride": width}
    )
    sized(torch.randn(1, 64), 24)
    for width in (40, 24, 1000):
        x = torch.randn(1, 64)
        sized(x, width)
    assert len(standin.launched) == 3
    encoded, *_ = standin.launched[-1].parameters
    assert len(encoded) == 128
    assert struct.unpack("=Q", encoded[:8])[0] == x.data_ptr()
    found = numbers(standin.launched[-1].parameters)
    assert found[:4] == [1, 64, 64, 1]  # shape and strides of the descriptor
    assert found[6:8] == [63, 1000]
    assert standin.launched[-1].parameters[9] == struct.pack("=f", 0.375)
    assert [numbers(each.parameters)[7] for each in standin.launched] == [40, 24, 1000]


def test_tables_are_read_from_the_layout_at_hand(standin):
    """Small integers are shared objects, so strides may be the very integers of the layout, such as its lengths."""
    kernel = launcher.kernel_launcher(triton.jit(_kernel_of_values.fn))

    def start(layout, out):
        tables = Tables(layout.kv_indptr, layout.kv_masks)
        kernel[(1,)](tables, Strides(layout.seqlen_q, layout.block_size[0]), out, BLOCK=4)

    layout = dx.SlidingWindow(16).layout(64, block_size=16)
    for _ in range(3):
        launch_cache.record_or_replay(start, layout, (torch.empty(64, dtype=torch.int32),))
    layout.kv_masks.set_(layout.kv_masks.clone())
    launch_cache.record_or_replay(start, layout, (torch.empty(64, dtype=torch.int32),))
    (first, second) = (numbers(each.parameters) for each in standin.launched)
    assert second[:4] == [layout.kv_indptr.data_ptr(), layout.kv_masks.data_ptr(), 64, 16]
    assert (first[0], first[2:4]) == (second[0], second[2:4])
    assert first[1] != second[1]


def test_options_of_launches(standin):
    @launcher.kernel_launcher
    @triton.jit
    def kernel(p_x, p_out):
        tl.store(p_out, tl.load(p_x))

    def call(given, x, options):
        out = torch.empty(64)
        kernel[(4,)](x, out, **dict(options))
        return (out,)

    attributes = []
    for options in ((), (("launch_pdl", True),), (("launch_cooperative_grid", True),), (("num_ctas", 2),)):
        for _ in range(2):
            launch_cache.record_or_replay(call, Given(torch.randn(4)), (torch.randn(64),), options, at_once=True)
        attributes.append(standin.launched[-1].attributes)
    assert standin.launched[-1].sizes[0] == 8
    assert [[number for number, _ in each] for each in attributes] == [[], [6], [2], [4, 5]]
    assert attributes[1][0][1][0] == attributes[2][0][1][0] == 1
    assert attributes[3][0][1] == [2, 1, 1]


def test_parameters_that_the_driver_reads_otherwise_go_through_triton(fresh, monkeypatch):
    for wrong in ([8, 8, 4, 8, 8], [8, 8, 8, 8, 8, 8], [8, 8]):
        monkeypatch.setattr(fresh, "parameter_info", None)
        library = fresh.library._replace(parameter_info=lambda f, i, o, s, wrong=wrong: _info(wrong, i, s))
        monkeypatch.setattr(launch_list, "cuda_library", lambda library=library: library)
        launch_cache.recordings.clear()
        CALLS.clear()
        for _ in range(3):
            run(simple, torch.randn(64))
        assert len(CALLS) == 3
        assert not fresh.launched
    assert set(launch_cache.recordings.values()) == {recorder.NOT_REPLAYABLE}


def _info(widths, index, size):
    if index >= len(widths):
        return INVALID_VALUE
    size._obj.value = widths[index]
    return 0


def test_errors_of_the_driver(fresh):
    run(simple, torch.randn(64))
    fresh.result = LAUNCH_FAILED
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        run(simple, torch.randn(64))
    fresh.result = 0
    run(simple, torch.randn(64))
    assert len(fresh.launched) == 2


def test_another_context_launches_through_triton(fresh):
    run(simple, torch.randn(64))
    fresh.context = 4321
    before = len(CALLS)
    (out,) = run(simple, torch.randn(64))
    assert out.shape == (64,)
    assert len(CALLS) == before + 1
    assert not fresh.launched


def test_lists_need_a_driver_a_compiler_and_a_triton_that_launches_directly(started, monkeypatch):
    monkeypatch.setenv(launch_list.ENVIRONMENT, "1")
    assert launch_list._code() is None  # the driver of these tests

    class CudaDriver(Driver):
        pass

    monkeypatch.setattr(triton.runtime.driver, "_active", CudaDriver())
    monkeypatch.setattr(launch_list, "cuda_library", StandIn)
    launch_list._loaded_code.cache_clear()
    assert launch_list._code() is not None
    for name in ("cuda_library", "compiled_code"):
        launch_list._loaded_code.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(launch_list, name, no_compiler)
            assert launch_list._code() is None
        launch_list._loaded_code.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(launch_list, "launches_directly", lambda: False)
        assert launch_list._code() is None
    monkeypatch.setenv(launch_list.ENVIRONMENT, "0")
    assert launch_list._code() is None


def no_compiler():
    raise RuntimeError("Failed to find C compiler")


def test_bad_lists(standin):
    code = launch_list._code()
    make = lambda *given: code.LaunchList(standin.library.addresses, *given)
    launch = (1, 1, 1, 1, 4, 1, 0, False, False, 1)
    for given in (
        ([launch], [0, 8], bytes(16), [], [], []),
        ([launch], [0], bytes(8), [(4, 0, 0)], [], []),
        ([launch], [0], bytes(8), [], [(0, 0, 0)], []),
        ([launch], [0], bytes(8), [], [], [(0, 0, 0)]),
        ([launch], [0], bytes(8), [(0, 1000, 0)], [], []),
        ([launch], [0], bytes(1 << 20), [], [], []),
        ([launch] * 2000, [0] * 2000, bytes(8), [], [], []),
    ):
        with pytest.raises(ValueError, match=r"must|too many"):
            make(*given)
    with pytest.raises(TypeError):
        make([(1, 2)], [], b"", [], [], [])
    standin.widths[1] = [8]
    made = make([launch], [0], bytes(8), [(0, 1, 8)], [], [])
    assert made.run(0, [0, 100], [])
    assert numbers(standin.launched[-1].parameters) == [108]
    for given in ((0, [100], []), (0, [], [])):
        with pytest.raises(ValueError, match="tensors and sizes"):
            made.run(*given)
    for given in ((0, (0, 100), []), (0, [0, 100]), (0, ["x", 100], [])):
        with pytest.raises(TypeError):
            made.run(*given)
    with pytest.raises(ValueError, match="too many"):
        made.run(0, [0] * 1000, [])
    nothing = make([(1, 0, 1, 1, 4, 1, 0, False, False, 1)], [0], bytes(8), [], [], [])
    before = len(standin.launched)
    nothing.run(0, [], [])
    assert len(standin.launched) == before


def test_sizes_are_flat():
    assert launch_list.flat_sizes({"a": 3, "b": Strides(4, 5), "c": (6,)}) == [3, 4, 5, 6]


def test_a_recording_repeats_from_addresses(fresh, monkeypatch):
    run(simple, torch.randn(64))
    replayed = []
    run(simple, torch.randn(64), replayed=replayed)
    (recording,) = replayed
    k, x = torch.randn(3, 64), torch.randn(64)
    fresh.launched.clear()
    (out,) = recording.start([k.data_ptr(), x.data_ptr()], -1, [])
    assert out.shape == (64,)
    assert numbers(fresh.launched[0].parameters)[:3] == [x.data_ptr(), k.data_ptr(), out.data_ptr()]
    fresh.context = 4321
    assert recording.start([k.data_ptr(), x.data_ptr()], -1, []) is None
    assert launch_cache.replay(recording, (k,), (x,)) is None  # the tensors of this test are on another device
    monkeypatch.setattr(Driver, "get_current_device", staticmethod(lambda: -1))
    assert launch_cache.replay(recording, (k,), (x,)) is None  # another context
    fresh.context = 1234
    (out,) = launch_cache.replay(recording, (k,), (x,))
    assert numbers(fresh.launched[1].parameters)[2] == out.data_ptr()


def test_a_layer_replays_only_what_is_alike_and_aligned():
    class Repeats:
        def start(self, addresses, index, sizes):
            return (torch.tensor(addresses),)

    q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.float16) for _ in range(3))
    replay = LayerReplay(Repeats(), -1, (), (1024,), form_of_call(q, k, v, None))
    assert replay(q, k, v, None).tolist() == [1024, q.data_ptr(), k.data_ptr(), v.data_ptr()]
    odd = torch.randn(257, dtype=torch.float16)[1:].view(1, 2, 8, 16)
    for each in ((odd, k, v), (q, odd, v), (q, k, odd), (q[:, :, :7], k, v), (q.float(), k, v)):
        assert replay(*each, None) is None
    assert replay(q, k, v, torch.zeros(2)) is None
    assert replay(q, k, v.requires_grad_(), None) is None
    with torch.no_grad():
        assert replay(q, k, v, None) is not None
    assert replay(torch.nn.Parameter(q), k, v.detach(), None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_lists_launch_on_a_gpu(kept, monkeypatch):
    monkeypatch.setenv(launch_list.ENVIRONMENT, "1")
    add = launcher.kernel_launcher(triton.jit(add_kernel.fn))
    scaled = launcher.kernel_launcher(triton.jit(of_descriptors.fn, do_not_specialize=["count"]))

    def call(given, x, scale):
        between, out = (torch.empty(1, 64, device="cuda", dtype=dtype) for dtype in (torch.float16, torch.float32))
        add[(1,)](x, given.k, between, BLOCK=64)
        described, stride = TensorDescriptor(between, [1, 64], [64, 1], [1, 64]), given.k.stride(0)
        scaled[(1,)](described, out, given.k, count=64, stride=stride, scale=scale, BIASED=True, BLOCK=64)
        return (out,)

    check = lambda found, wanted: torch.testing.assert_close(found, wanted, atol=0.01, rtol=0.0)  # fp16 in between
    for width in (72, 40, 72, 200, 40):
        k, x = torch.randn(64, width, device="cuda"), torch.randn(64, device="cuda")
        repeated = lambda k=k, x=x, width=width: launch_cache.record_or_replay(
            call, Given(k), (x,), 0.5, at_once=True, sizes={"stride": width}
        )
        expected = ((x + k.flatten()[:64]) * 0.5 + k[:, 0])[None]
        check(repeated()[0], expected)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            (out,) = repeated()
        stream.synchronize()
        check(out, expected)
    assert recorder.NOT_REPLAYABLE not in launch_cache.recordings.values()


def test_the_code_can_be_made_ahead(monkeypatch):
    asked = []
    monkeypatch.setattr(launch_list, "_code", lambda: asked.append(1))
    launch_list.prepare_lists()
    assert asked == [1]
