# SPDX-License-Identifier: Apache-2.0
"""A stand-in for TensorRT's C++ libraries, so that NVIDIA's own `tensorrt.plugin` can be imported and driven.

No registry has the libraries (`libnvinfer.so.11` and two more). The bindings (`tensorrt-cu13-bindings`) need nine
functions of them to be imported; here these return nothing. So these are NVIDIA's: the enumerations, the descriptors,
the checks of signatures, and the classes that call a plugin's functions. These are ours: the registry of creators, the
arithmetic of dimensions, and the launch. **No engine is built or run.**
"""

from __future__ import annotations

import ctypes
import importlib.util
import operator
import subprocess
import sys
import warnings
from types import SimpleNamespace

LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")
MISSING = """
#define NOTHING(name) void* name(void) { return 0; }
NOTHING(createInferBuilder_INTERNAL) NOTHING(createInferRefitter_INTERNAL) NOTHING(createInferRuntime_INTERNAL)
NOTHING(createNvOnnxParserRefitter_INTERNAL) NOTHING(createNvOnnxParser_INTERNAL) NOTHING(getBuilderPluginRegistry)
NOTHING(getPluginRegistry) NOTHING(getNvOnnxParserVersion) NOTHING(initLibNvInferPlugins)
"""


def has_bindings():
    return importlib.util.find_spec("tensorrt_bindings") is not None


def load(folder):
    """Import NVIDIA's bindings as `tensorrt` over empty libraries, compiled into `folder`; return the module."""
    source = folder / "missing.c"
    source.write_text(MISSING)
    for name in LIBRARIES:
        path = folder / f"lib{name}.so.11"
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path)]
        if not path.exists():
            subprocess.run(["cc", str(source), *flags], check=True)
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    import tensorrt_bindings

    sys.modules["tensorrt"] = tensorrt_bindings
    registry = Registry()
    tensorrt_bindings.get_plugin_registry = lambda: registry
    tensorrt_bindings.DimsExprs = lambda length: [None] * length
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NVIDIA's docstrings hold escapes that Python warns of
        import tensorrt.plugin._plugin_class as plugin_class
        import tensorrt.plugin._tensor as tensor

    tensor.SymExprImpl = lambda expr: expr._expr
    plugin_class.Shape = Shape
    return tensorrt_bindings


class Registry:
    """Creators of plugins by namespace and name."""

    def __init__(self):
        self.creators = {}

    def register_creator(self, creator, namespace):
        self.creators[namespace, creator.name] = creator
        return True

    def get_creator(self, name, version, namespace):
        return self.creators[namespace, name]


class Shape(tuple):
    """Sizes of a tensor."""

    __slots__ = ()

    def __new__(cls, desc=()):
        return tuple.__new__(cls, getattr(desc, "dims", desc))

    def _clone(self):
        return self


def dimensions(trt):
    """Return a maker of dimensions, and the builder of expressions over them."""

    class Dimension(trt.IDimensionExpr):
        """A size that is known now, or when the lengths are known."""

        def is_constant(self):
            return self.fixed

        def get_constant_value(self):
            assert self.fixed, "TensorRT does not know this number while it builds"
            return self.value

        def is_size_tensor(self):
            return False

    def made(value, fixed=True):
        found = Dimension.__new__(Dimension)  # TensorRT alone constructs these
        found.value, found.fixed = int(value), fixed
        return found

    kinds = trt.DimensionOperation
    operations = {
        kinds.SUM: operator.add, kinds.SUB: operator.sub, kinds.PROD: operator.mul, kinds.MAX: max, kinds.MIN: min,
        kinds.EQUAL: operator.eq, kinds.LESS: operator.lt, kinds.FLOOR_DIV: operator.floordiv,
        kinds.CEIL_DIV: lambda a, b: -(-a // b),
    }  # fmt: skip

    def operation(kind, first, second):
        return made(operations[kind](first.value, second.value), first.fixed and second.fixed)

    return made, SimpleNamespace(constant=made, operation=operation)


class Network:
    """A network that creates its plugins and stores their arguments."""

    def __init__(self, trt):
        self.trt, self.layers = trt, []

    def add_input(self, name, dtype, shape):
        """Return a tensor of TensorRT's class, which only TensorRT can construct."""
        kind = type("Input", (self.trt.ITensor,), {})
        return kind.__new__(kind)

    def add_plugin(self, made, *, aot):
        asked = self.trt.QuickPluginCreationRequest
        inputs, _, plugin = made(asked.STRICT_AOT if aot else asked.STRICT_JIT)
        self.layers.append((inputs, aot))
        return SimpleNamespace(get_output=lambda i: (plugin, i))


class Driven:
    """A plugin of NVIDIA's Python class, called as TensorRT calls it while it builds an engine.

    Args:
        trt: the module.
        plugin_id: its namespace and name.
        attributes: by name, as `network.add_plugin` gets them.
        aot: whether the ahead-of-time form is asked for.
    """

    def __init__(self, trt, plugin_id, attributes, *, aot):
        from tensorrt.plugin._lib import QDP_REGISTRY

        self.trt, self.made = trt, QDP_REGISTRY[plugin_id]
        namespace, name = plugin_id.split("::")
        creator = trt.get_plugin_registry().get_creator(name, "1", namespace)
        assert list(attributes) == list(self.made.input_attrs), "attributes come in the order of the registration"
        fields = [self._field(key, value) for key, value in attributes.items()]
        asked = trt.QuickPluginCreationRequest
        self.plugin = creator.create_plugin(
            name, namespace, fields, trt.TensorRTPhase.BUILD, asked.STRICT_AOT if aot else asked.STRICT_JIT
        )
        self.dimension, self.builder = dimensions(trt)

    def _field(self, name, value):
        import numpy as np

        data = np.frombuffer(value.encode(), np.int8) if isinstance(value, str) else np.array([value])
        return SimpleNamespace(name=name, data=data)

    def shapes(self, dtypes, sizes, fixed=lambda tensor, at: at == 3):
        """Return dtypes and shapes of the outputs for these inputs."""
        self.dtypes, self.sizes = list(dtypes), [tuple(each) for each in sizes]
        self.output_dtypes = self.plugin.get_output_data_types(self.dtypes, [len(each) for each in sizes])
        inputs = [
            [self.dimension(size, fixed(i, at)) for at, size in enumerate(each)] for i, each in enumerate(self.sizes)
        ]
        self.inputs = inputs
        found = self.plugin.get_output_shapes(inputs, [], self.builder)
        self.output_sizes = [tuple(each.value for each in shape) for shape in found]
        return self.output_dtypes, self.output_sizes

    def kernel(self):
        """Return name, PTX and launch of the kernel: grid, block, shared memory and the numbers after the inputs."""
        linear, dtypes = self.trt.TensorFormat.LINEAR, [*self.dtypes, *self.output_dtypes]
        sizes = [*self.sizes, *self.output_sizes]
        described = [
            SimpleNamespace(dims=size, desc=SimpleNamespace(type=dtype, format=linear, scale=1.0, dims=size))
            for dtype, size in zip(dtypes, sizes, strict=True)
        ]
        launch, numbers = SimpleNamespace(), Numbers()
        self.plugin.set_tactic(0)
        count = len(self.dtypes)
        self.plugin.get_launch_params(self.inputs, described, count, launch, numbers, self.builder)
        name, ptx = self.plugin.get_kernel(
            [each.desc for each in described[:count]], [each.desc for each in described[count:]]
        )
        values = {key: each.value for key, each in vars(launch).items()}
        return name, ptx.decode(), values, [numbers[i].value for i in range(numbers.nbSymExprs)]


class Numbers(dict):
    """The numbers of a launch."""

    nbSymExprs = 0


def launch(ptx, name, sizes, inputs, numbers, outputs):
    """Launch a kernel as TensorRT does: addresses of the inputs, 32-bit numbers, addresses of the outputs."""
    import torch

    cuda = ctypes.CDLL("libcuda.so.1")

    def call(function, *arguments):
        status = getattr(cuda, function)(*arguments)
        assert status == 0, f"{function} failed with CUDA error {status}"

    torch.cuda.synchronize()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ptx.encode() + b"\0")
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    values = [ctypes.c_void_p(x.data_ptr()) for x in inputs]
    values += [ctypes.c_int32(number) for number in numbers]
    values += [ctypes.c_void_p(x.data_ptr()) for x in outputs]
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.byref(each), ctypes.c_void_p) for each in values])
    grid = [ctypes.c_uint(sizes[f"{kind}_{axis}"]) for kind in ("grid", "block") for axis in "xyz"]
    call("cuLaunchKernel", function, *grid, ctypes.c_uint(sizes["shared_mem"]), None, pointers, None)
    torch.cuda.synchronize()
    call("cuModuleUnload", module)
