# SPDX-License-Identifier: Apache-2.0
"""A list launches what Triton's launchers launch; a stand-in for the CUDA driver reads its packed parameters."""

import ctypes
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

import triton.language as tl  # noqa: E402
from test_launcher import Driver, Strides, Tables, Utils, _kernel_of_values, launches_directly, started  # noqa: E402, F401
from test_launcher import _kernel as of_descriptors  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from dynaxx.kernels.gpu.runtime import launch_cache, launch_list, launcher, recorder  # noqa: E402
from dynaxx.kernels.gpu.runtime.launch_list import CudaLibrary, compiled_code  # noqa: E402
from dynaxx.ops.prepared.layer import LayerReplay, form_of_call  # noqa: E402

pytestmark = [pytestmark, launches_directly]
INVALID_VALUE, LAUNCH_FAILED = 1, 719
WORDS = {8: "q", 4: "i", 2: "h", 1: "b"}


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Launched(NamedTuple):
    function: int
    sizes: list[int]
    stream: int
    attributes: list[tuple[int, list[int]]]
    parameters: list[bytes]


class StandIn:
    """A CUDA driver that notes launches, and knows the parameters of kernels from their PTX."""

    def __init__(self):
        self.launched, self.widths, self.result, self.context = [], {}, 0, 1234
        launch_type = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        )
        replace_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        context_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
        self._functions = launch_type(self.launch), replace_type(self.replace), context_type(self.context_of)
        addresses = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)
        self.library = CudaLibrary(addresses, self.parameter_info)

    def launch(self, config, function, parameters, extra):
        found = config[0]
        attributes = [(each.id, list(each.value[:3])) for each in found.attributes[: found.count]]
        values = [ctypes.string_at(parameters[i], width) for i, width in enumerate(self.widths[function])]
        self.launched.append(Launched(function, list(found.sizes), found.stream, attributes, values))
        return self.result

    def replace(self, encoded, address):
        assert encoded % 64 == 0
        ctypes.memmove(encoded, struct.pack("=Q", address), 8)
        return 0

    def context_of(self, found):
        found[0] = self.context
        return 0

    def parameter_info(self, function, index, offset, size):
        widths = self.widths[function]
        if index >= len(widths):
            return INVALID_VALUE
        size._obj.value = widths[index]
        return 0


class Node(ctypes.Structure):
    """The parameters of a kernel in a graph."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("rest", ctypes.c_void_p * 3),
    ]


P, I = ctypes.c_void_p, ctypes.c_int  # noqa: E741


class GraphStandIn(StandIn):
    """A CUDA driver that notes launches of graphs, too. A graph launches what its nodes hold at that time."""

    def __init__(self):
        super().__init__()
        self.capturing, self.made, self.graphs, self.destroyed, self.fails, self.modes = 0, [], [], [], {}, []
        kinds = {
            "is_capturing": (P, ctypes.POINTER(I)),
            "exchange_mode": (ctypes.POINTER(I),),
            "create": (ctypes.POINTER(P), ctypes.c_uint),
            "add": (ctypes.POINTER(P), P, ctypes.POINTER(P), ctypes.c_size_t, ctypes.POINTER(Node)),
            "instantiate": (ctypes.POINTER(P), P, ctypes.c_ulonglong),
            "set": (P, P, ctypes.POINTER(Node)),
            "launch_graph": (P, P),
            "destroy_ready": (P,),
            "destroy": (P,),
        }
        made = [ctypes.CFUNCTYPE(I, *of)(self._failing(name)) for name, of in kinds.items()]
        self._functions += tuple(made)
        addresses = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)
        self.library = CudaLibrary(addresses, self.parameter_info)

    def _failing(self, name):
        return lambda *given: self.fails.get(name) or getattr(self, name)(*given) or 0

    def is_capturing(self, stream, found):
        found[0] = self.capturing

    def exchange_mode(self, mode):
        self.modes.append(mode[0])
        mode[0] = 0

    def create(self, found, flags):
        self.made.append([])
        found[0] = 1000 + len(self.made)

    def add(self, found, graph, before, count, node):
        nodes = self.made[graph - 1001]
        assert count == (1 if nodes else 0)
        assert not nodes or before[0] == 100 * (graph - 1000) + len(nodes)
        nodes.append(self._read(node[0]))
        found[0] = 100 * (graph - 1000) + len(nodes)

    def instantiate(self, found, graph, flags):
        found[0] = graph + 1000

    def set(self, ready, node, parameters):
        nodes = self.made[ready - 2001]
        nodes[node % 100 - 1] = self._read(parameters[0])

    def launch_graph(self, ready, stream):
        self.graphs.append((ready - 2000, [each._replace(stream=stream) for each in self.made[ready - 2001]]))

    def destroy_ready(self, ready):
        self.destroyed.append(ready)

    def destroy(self, graph):
        self.destroyed.append(graph)

    def _read(self, node):
        values = [ctypes.string_at(node.parameters[i], width) for i, width in enumerate(self.widths[node.function])]
        return Launched(node.function, list(node.sizes), 0, [], values)


class Launcher:
    """Replaces Triton's launcher; recordings without a list use it."""

    def __init__(self, src, metadata):
        self.calls = CALLS

    def __call__(self, *arguments):
        self.calls.append(arguments)


CALLS = []


@pytest.fixture
def standin(started, monkeypatch, request):  # noqa: F811
    found, numbers, loaded = getattr(request, "param", StandIn)(), iter(range(100, 200)), []

    def load_binary(self, name, kernel, shared, device):
        ptx = PTX[kernel]
        declared = re.findall(r"\.param (?:\.align \d+ )?\.([busf])(\d+)[^\[,\n]*?_param_\d+(?:\[(\d+)\])?", ptx)
        number = next(numbers)
        found.widths[number] = [int(count) if count else int(bits) // 8 for _, bits, count in declared]
        return 1, number, 100, 0, 1024

    init = triton.compiler.CompiledKernel.__init__

    def remember(self, *arguments, **named):
        init(self, *arguments, **named)
        PTX[self.kernel] = self.asm["ptx"]
        loaded.append(self)

    fill = "fill_tma_descriptor" if triton.__version__.startswith("3.6.") else "fill_tma_descriptor_tiled"
    monkeypatch.setattr(triton.compiler.CompiledKernel, "__init__", remember)
    monkeypatch.setattr(Utils, "load_binary", load_binary)
    monkeypatch.setattr(Utils, fill, lambda self, *arguments: struct.pack("=Q", arguments[0]) * 16, raising=False)
    monkeypatch.setattr(Driver, "launcher_cls", Launcher)
    monkeypatch.setattr(launch_list, "map_bytes", lambda made: made)
    monkeypatch.setattr(launch_list, "cuda_library", lambda: found.library)
    code = compiled_code()
    monkeypatch.setattr(launch_list, "_code", lambda: code)
    monkeypatch.setattr(launch_cache, "_by_form", {})
    CALLS.clear()
    yield found
    for kernel in loaded:
        kernel.module = None  # there is nothing to unload


PTX = {}  # by machine code


class Given(NamedTuple):
    k: torch.Tensor
    form: str = "given"

    @property
    def kernel_inputs(self):
        return (self.k,)


def numbers(parameters):
    return [struct.unpack("=" + WORDS[len(each)], each)[0] for each in parameters if len(each) < 128]


def run(call, *tensors, k=None, **named):
    """Record a call, and return the results of its replay."""
    given = Given(torch.randn(3, 64) if k is None else k)
    return launch_cache.record_or_replay(call, given, tensors, at_once=True, **named)


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


def simple(given, x):
    out = torch.empty(64)
    _simple[(1,)](x, given.k, out, BLOCK=64)
    return (out,)


@launcher.kernel_launcher
@triton.jit
def _simple(p_x, p_k, p_out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(p_out + at, tl.load(p_x + at) + tl.load(p_k + at))


@pytest.fixture
def fresh(standin, monkeypatch):
    monkeypatch.setattr(_simple, "_compiled", {})
    monkeypatch.setattr(
        _simple.kernel, "device_caches", type(_simple.kernel.device_caches)(_simple.kernel.create_binder)
    )
    return standin


def test_parameters_that_the_driver_reads_otherwise_go_through_triton(fresh, monkeypatch):
    for wrong in ([8, 8, 4, 8, 8], [8, 8, 8, 8, 8, 8], [8, 8]):
        monkeypatch.setattr(fresh, "parameter_info", None)
        library = fresh.library._replace(parameter_info=lambda f, i, o, s, wrong=wrong: _info(wrong, i, s))
        monkeypatch.setattr(launch_list, "cuda_library", lambda library=library: library)
        launch_cache._by_form.clear()
        CALLS.clear()
        for _ in range(3):
            run(simple, torch.randn(64))
        assert len(CALLS) == 3
        assert not fresh.launched
    (kept,) = launch_cache._by_form.values()
    assert kept.together is None


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
    launch_cache._by_form.clear()
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
    (kept,) = (each for each in launch_cache._by_form.values() if len(each.launches) == 3)
    addresses = [torch.randn(64).data_ptr() for _ in range(4)]
    for i in range(40):  # two streams in turns: the graph stays with one
        assert kept.together.run(7 + 4 * (i % 2), addresses, [])
    assert (len(fresh.launched), len(fresh.graphs)) == (78, 22)
    for _ in range(20):  # it follows a stream that is used alone
        assert kept.together.run(11, addresses, [])
    assert (len(fresh.launched), len(fresh.graphs)) == (78 + 45, 27)
    assert fresh.graphs[-1][1][0].stream == 11
    compiled_code().use_graphs(False)
    try:
        assert kept.together.run(11, addresses, [])
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


def test_another_context_launches_through_triton(fresh):
    run(simple, torch.randn(64))
    fresh.context = 4321
    before = len(CALLS)
    (out,) = run(simple, torch.randn(64))
    assert out.shape == (64,)
    assert len(CALLS) == before + 1
    assert not fresh.launched


def test_lists_need_a_driver_a_compiler_and_a_known_triton(started, monkeypatch):  # noqa: F811
    monkeypatch.setenv(launch_list.ENVIRONMENT, "1")
    monkeypatch.setattr(launch_list, "RAN_WITH", (".".join(triton.__version__.split(".")[:2]),))
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
        patch.setattr(triton, "__version__", "4.0.0")
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
    assert recorder.flat_sizes({"a": 3, "b": Strides(4, 5), "c": (6,)}) == [3, 4, 5, 6]


def test_a_recording_repeats_from_addresses(fresh, monkeypatch):
    run(simple, torch.randn(64))
    last = []
    run(simple, torch.randn(64), last=last)
    (recording,) = last
    k, x = torch.randn(3, 64), torch.randn(64)
    fresh.launched.clear()
    (out,) = recording.repeat([k.data_ptr(), x.data_ptr()], -1, [])
    assert out.shape == (64,)
    assert numbers(fresh.launched[0].parameters)[:3] == [x.data_ptr(), k.data_ptr(), out.data_ptr()]
    fresh.context = 4321
    assert recording.repeat([k.data_ptr(), x.data_ptr()], -1, []) is None
    assert recording._replace(together=None).repeat([k.data_ptr(), x.data_ptr()], -1, []) is None
    assert launch_cache.replay(recording, (k,), (x,)) is None  # the tensors of this test are on another device
    monkeypatch.setattr(Driver, "get_current_device", staticmethod(lambda: -1))
    (out,) = launch_cache.replay(recording, (k,), (x,))  # through Triton's launcher, because of the context
    assert out.shape == (64,)
    assert len(fresh.launched) == 1


def test_a_layer_replays_only_what_is_alike_and_aligned():
    class Repeats:
        def repeat(self, addresses, index, sizes):
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
@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="lists ran with triton 3.6")
def test_lists_launch_on_a_gpu(monkeypatch):
    monkeypatch.setenv(launch_list.ENVIRONMENT, "1")
    monkeypatch.setattr(launch_cache, "_by_form", {})
    add = launcher.kernel_launcher(triton.jit(_simple.fn))
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
    assert all(each.together is not None for each in launch_cache._by_form.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="lists ran with triton 3.6")
def test_graphs_launch_on_a_gpu(monkeypatch):
    monkeypatch.setenv(launch_list.ENVIRONMENT, "1")
    monkeypatch.setattr(launch_cache, "_by_form", {})
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
    assert all(each.together is not None for each in launch_cache._by_form.values())


def test_the_code_can_be_made_ahead(monkeypatch):
    asked = []
    monkeypatch.setattr(launch_list, "_code", lambda: asked.append(1))
    launch_list.prepare_lists()
    assert asked == [1]
