# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the CUDA driver, which note launches and graphs, for tests of `launch_list` without a GPU."""

import ctypes
import itertools
import re
import struct
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from test_launcher import Driver, Utils, started  # noqa: F401
from triton.backends.nvidia import driver as nvidia

from dynaxx.kernels.runtime import launch_cache, launch_list, launcher
from dynaxx.kernels.runtime.launch_list import CudaLibrary, compiled_code

ONE_LAUNCHER = not hasattr(nvidia, "make_launcher")  # since 3.7, one launcher in C starts all kernels
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

    widths = {}  # noqa: RUF012 -- of the parameters by function; Triton keeps kernels of tests before

    def __init__(self):
        self.launched, self.result, self.context = [], 0, 1234
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
    """Replaces Triton's launcher, which starts what is not replayed."""

    def __init__(self, src, metadata):
        self.calls = CALLS

    def __call__(self, *arguments):
        self.calls.append(arguments)


CALLS = []


@pytest.fixture
def standin(started, kept, monkeypatch, request):  # noqa: F811
    found = getattr(request, "param", StandIn)()

    def load_binary(self, name, kernel, shared, device):
        ptx = PTX[kernel]
        declared = re.findall(r"\.param (?:\.align \d+ )?\.([busf])(\d+)[^\[,\n]*?_param_\d+(?:\[(\d+)\])?", ptx)
        number = next(FUNCTIONS)
        found.widths[number] = [int(count) if count else int(bits) // 8 for _, bits, count in declared]
        return 1, number, 100, 0, 1024

    init = triton.compiler.CompiledKernel.__init__

    def remember(self, *arguments, **named):
        init(self, *arguments, **named)
        PTX[self.kernel] = self.asm["ptx"]

    fill = "fill_tma_descriptor_tiled" if ONE_LAUNCHER else "fill_tma_descriptor"
    monkeypatch.setattr(triton.compiler.CompiledKernel, "__init__", remember)
    monkeypatch.setattr(Utils, "load_binary", load_binary)
    monkeypatch.setattr(Utils, fill, lambda self, *arguments: struct.pack("=Q", arguments[0]) * 16, raising=False)
    monkeypatch.setattr(Driver, "launcher_cls", Launcher)
    monkeypatch.setattr(launch_list, "map_bytes", lambda made: made)
    monkeypatch.setattr(launch_list, "cuda_library", lambda: found.library)
    code = compiled_code()
    monkeypatch.setattr(launch_list, "_code", lambda: code)
    CALLS.clear()
    return found


PTX = {}  # by machine code
FUNCTIONS = itertools.count(100)


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
