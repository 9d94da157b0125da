# SPDX-License-Identifier: Apache-2.0
"""Launch all kernels of a recording by one call of compiled code.

Triton's launcher reads every argument of a kernel from a Python object at every launch. A recording knows all of them
but the addresses of tensors and the sizes of its call, so `LaunchPacker` packs the parameters once, as the CUDA driver
expects them, and `launch_list.c` fills the gaps and launches.

    recorded launches --> LaunchPacker --> LaunchList;  LaunchList.run(stream, addresses, sizes) launches

From the third run on, a list of three or more kernels is launched as a CUDA graph, after the parameters of its nodes
were set.

The C compiler that Triton needs for its own launchers compiles the C file on first use. Everything that Triton decides
at a launch is read from the compiled kernel, and the driver confirms the size of each parameter. If something is
missing or different, there is no list, and the call is not replayed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from triton.runtime import driver

from dynaxx.kernels.compat import encoded_map, is_plain_map, needs_wrapper
from dynaxx.kernels.runtime.launcher import DESCRIPTORS, Launch
from dynaxx.kernels.trials import launches_directly

ENVIRONMENT = "DYNAXX_LAUNCH_LISTS"  # "0": calls are not replayed
GRAPHS = "DYNAXX_LAUNCH_GRAPHS"  # "0": lists launch kernel by kernel
FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
MAP_BYTES, MAP_ALIGNMENT = 128, 128
SCRATCH = 2  # pointers that Triton appends to the parameters of every kernel
MAX_CTAS = 8  # larger clusters need an attribute of the kernel
CUDA_INVALID_VALUE = 1

logger = logging.getLogger("dynaxx")

Place = tuple[int, int]  # a number of a tensor, see `Recording`, and an offset in bytes
Sizes = Mapping[str, "int | tuple[int, ...]"]  # see `record_or_replay`
PlaceOf = Callable[[Tensor], "Place | None"]


class LaunchList(Protocol):
    """Launches with packed parameters."""

    def run(self, stream: int, addresses: list[int], sizes: list[int]) -> bool:
        """Start the kernels, and return True; return False if this thread has another CUDA context.

        Args:
            stream: handle of a stream.
            addresses: the address of each numbered tensor.
            sizes: all integers of the call's sizes.
        """


class Unpackable(Exception):
    """A launch that a list cannot hold. Its call is not replayed."""


def flat_sizes(sizes: Sizes) -> list[int]:
    """Return all integers of a call's sizes, in order."""
    found: list[int] = []
    for x in sizes.values():
        found += x if isinstance(x, tuple) else (x,)
    return found


def launch_list(launches: Sequence[Launch | None], place_of: PlaceOf, sizes: Sizes) -> LaunchList | None:
    """Return a list of launches; None if the launches must go through Triton.

    Args:
        launches: recorded launches, in order; None for one that cannot be repeated.
        place_of: function that returns the number of a tensor, and an offset in bytes.
        sizes: see `record_or_replay`.
    """
    code = _code()
    if code is None or None in launches:
        return None
    packer = LaunchPacker(place_of, sizes)
    try:
        for launch in filter(None, launches):
            packer.add(launch)
        found: LaunchList = code.LaunchList(cuda_library().addresses, *packer.packed_launches())
    except (Unpackable, ValueError, OverflowError, struct.error) as error:
        logger.debug("a call is not replayed, because %s", error)
        return None
    return found


class LaunchPacker:
    """Pack the parameters of launches, with gaps for addresses and sizes."""

    def __init__(self, place_of: PlaceOf, sizes: Sizes) -> None:
        self._place_of, self._sizes = place_of, sizes
        lengths = [len(x) if isinstance(x, tuple) else 1 for x in sizes.values()]
        self._first = dict(
            zip(sizes, accumulate(lengths, initial=0), strict=False)
        )  # number of each one's first integer
        self._launches: list[tuple[Any, ...]] = []
        self._positions: list[int] = []
        self._widths: list[int] = []
        self._packed = bytearray()
        self._gaps: dict[str, list[tuple[int, int, int]]] = {"pointers": [], "maps": [], "sizes": []}

    def packed_launches(self) -> tuple[Any, ...]:
        """Return the arguments of a `LaunchList`."""
        return self._launches, self._positions, bytes(self._packed), *self._gaps.values()

    def add(self, launch: Launch) -> None:
        """Pack a launch.

        Raises:
            Unpackable: the launch needs what a list does not do.
        """
        compiled, first = launch.compiled, len(self._positions)
        meta = compiled.metadata
        warps, ctas, shared = compiled.packed_metadata[:3]
        if needs_wrapper(meta) or ctas > MAX_CTAS:
            raise Unpackable(f"{compiled.name} needs scratch memory or a large cluster")
        maps = iter(getattr(meta, "tensordesc_meta", None) or ())
        values = dict(zip(launch.names, launch.arguments, strict=True))
        for name, kind in compiled.src.signature.items():
            self._add_argument(name, kind, values[name], maps)
        for _ in range(SCRATCH):
            self._add_value("u64", 0)
        count = len(self._positions) - first
        _check_parameters(compiled.function, self._widths[first:])
        options = (bool(meta.launch_cooperative_grid), bool(meta.launch_pdl))
        self._launches.append((compiled.function, *launch.grid, warps, ctas, shared, *options, count))

    def _add_argument(self, name: str, kind: Any, x: Any, maps: Iterator[Any]) -> None:
        if type(x) in DESCRIPTORS:
            self._add_descriptor(x, next(maps, None))
            return
        if name in self._sizes and x != self._sizes[name]:
            raise Unpackable(f"{name} is not the size of the call")
        for i, (each, value) in enumerate(_flat(kind, x)):
            if each == "constexpr":
                continue
            if isinstance(value, Tensor):
                self._add_gap("pointers", *self._found(value))
                self._add_value("u64", 0)
            elif name in self._sizes:
                self._add_gap("sizes", self._first[name] + i, struct.calcsize(_format(each)))
                self._add_value(each, value)
            else:
                self._add_value(each, value)

    def _add_descriptor(self, x: Any, meta: Any) -> None:
        """Pack a descriptor: an encoded map, its shape and its strides."""
        if not is_plain_map(meta) or getattr(x, "round_f32_to_tf32", False):
            raise Unpackable("its descriptor is of another kind")
        encoded = map_bytes(encoded_map(x.base.data_ptr(), x, meta))
        self._packed += bytes(-len(self._packed) % MAP_ALIGNMENT)
        self._add_gap("maps", *self._found(x.base))
        self._positions.append(len(self._packed))
        self._widths.append(len(encoded))
        self._packed += encoded
        for size in x.shape:
            self._add_value("i32", size)
        for stride in x.strides:
            self._add_value("i64", stride)

    def _add_value(self, kind: str, value: Any) -> None:
        form = _format(kind)
        width = struct.calcsize(form)
        self._packed += bytes(-len(self._packed) % width)
        self._positions.append(len(self._packed))
        self._widths.append(width)
        self._packed += struct.pack(form, value)

    def _add_gap(self, kind: str, number: int, offset: int) -> None:
        """Note that the value to be added next is a gap."""
        width = {"pointers": 8, "maps": MAP_ALIGNMENT, "sizes": offset}[kind]
        self._gaps[kind].append((len(self._packed) + -len(self._packed) % width, number, offset))

    def _found(self, x: Tensor) -> Place:
        found = self._place_of(x)
        if found is None:
            raise Unpackable("it reads a tensor that the call does not name")
        return found


def _flat(kind: Any, x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the type and the value of an argument, or of each item of a tuple."""
    if isinstance(kind, tuple):
        for each, value in zip(kind, x, strict=True):
            yield from _flat(each, value)
    else:
        yield kind, x


def _format(kind: str) -> str:
    form = "Q" if kind.startswith("*") else FORMATS.get(kind)
    if form is None:
        raise Unpackable(f"it has a parameter of type {kind}")
    return "=" + form


def map_bytes(made: Any) -> bytes:
    """Return the bytes of one of Triton's tensor maps, which are the last ones of the object."""
    start = type(made).__basicsize__ - MAP_BYTES
    if type(made).__name__.rpartition(".")[2] != "PyCUtensorMap" or start < object.__basicsize__:
        raise Unpackable(f"a tensor map is a {type(made).__name__}")
    return ctypes.string_at(id(made) + start, MAP_BYTES)


def _check_parameters(function: int, widths: list[int]) -> None:
    """Compare the bytes of parameters with those that the driver reports. It may not know the scratch pointers."""
    library = cuda_library()
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for i, width in enumerate(widths):
        result = library.parameter_info(function, i, ctypes.byref(offset), ctypes.byref(size))
        if result == CUDA_INVALID_VALUE and i >= len(widths) - SCRATCH:
            return
        if result or size.value != width:
            raise Unpackable(f"parameter {i} has {size.value} bytes, not {width} (error {result})")
    if library.parameter_info(function, len(widths), ctypes.byref(offset), ctypes.byref(size)) != CUDA_INVALID_VALUE:
        raise Unpackable(f"the kernel has more than {len(widths)} parameters")


class CudaLibrary(NamedTuple):
    """The functions of the CUDA driver that lists use."""

    addresses: tuple[int, ...]  # of `LAUNCHING`, and of `GRAPHING` if lists may become graphs
    parameter_info: Callable[..., int]  # cuFuncGetParamInfo


LAUNCHING = ("cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuCtxGetCurrent")
GRAPHING = (
    "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuGraphCreate", "cuGraphAddKernelNode_v2",
    "cuGraphInstantiateWithFlags", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch", "cuGraphExecDestroy",
    "cuGraphDestroy",
)  # fmt: skip


@lru_cache(maxsize=1)
def cuda_library() -> CudaLibrary:
    """Return the functions of the installed driver.

    Raises:
        OSError: there is no driver.
        AttributeError: it is older than CUDA 12.4.
    """
    library = ctypes.CDLL("libcuda.so.1")
    names = LAUNCHING if os.environ.get(GRAPHS) == "0" else (*LAUNCHING, *GRAPHING)
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    info = library.cuFuncGetParamInfo
    info.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    return CudaLibrary(tuple(addresses), info)


def prepare_lists() -> None:
    """Compile and load the C code, for which the first list would otherwise wait."""
    _code()


def _code() -> Any:
    """Return the module of `launch_list.c`; None if lists are off or cannot be made."""
    off = os.environ.get(ENVIRONMENT) == "0" or not launches_directly()
    if off or type(driver.active).__name__ != "CudaDriver":
        return None
    return _loaded_code()


@lru_cache(maxsize=1)
def _loaded_code() -> Any:
    try:
        cuda_library()
        return compiled_code()
    except Exception as error:  # no compiler, no driver, an old one
        logger.debug("calls are not replayed: %s", error)
        return None


def compiled_code() -> Any:
    """Compile `launch_list.c`, unless it is in Triton's cache, and load it."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.build import compile_module_from_src

    source = Path(__file__).with_suffix(".c").read_text(encoding="utf-8")
    return compile_module_from_src(source, "dynaxx_launch_list", [], nvidia.include_dirs, [])
