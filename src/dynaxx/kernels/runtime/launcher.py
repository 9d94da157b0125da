# SPDX-License-Identifier: Apache-2.0
"""Launching of compiled kernels without Triton's per-call dispatch.

`kernel[grid](...)` binds, types and formats every argument into a string that identifies the compiled kernel. That
takes tens of microseconds, as long as a short call computes. This launcher keys compiled kernels by what Triton
specializes on: constants, dtypes, whether an integer is 1 or a multiple of 16, and whether a tensor's address is a
multiple of 16 bytes. Integers above 31 bits are rare and go through Triton.

The launcher relies on what `JITFunction.run` specializes kernels on and on `CompiledKernel.run`, which itself handles
scratch memory, clusters and overlapping launches. `kernels.trials` says with which versions of Triton that was proven;
a version that fails its trial uses Triton's own dispatch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from dynaxx.kernels.compat import OPTIONS
from dynaxx.kernels.trials import launches_directly

DESCRIPTORS: set[type] = {TensorDescriptor}


class CallSignature(NamedTuple):
    """Positions of each kind of argument in the order of parameters, for calls with the same names and types."""

    in_order: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # puts the values of a call in the order of parameters
    constants: tuple[int, ...]  # positions in the call of constants and launch options
    tensors: tuple[int, ...]
    descriptors: tuple[int, ...]
    sizes: tuple[int, ...]  # integers that do not specialize the kernel
    special: tuple[int, ...]  # integers that specialize the kernel
    tables: tuple[int, ...]  # NamedTuples of tensors
    strides: tuple[int, ...]  # NamedTuples of integers that specialize the kernel


class KernelLauncher:
    """A jitted kernel that is launched as in Triton, `kernel[grid](...)`, with an argument for every parameter.

    An argument may be a NamedTuple, either of tensors or of integers. Triton specializes kernels on such integers, even
    if the parameter is listed in `do_not_specialize`, so lengths are passed one by one.
    The first call of each kind goes through Triton. So do all calls under the interpreter, and on HIP, where Triton
    specializes kernels on more properties.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._can_bypass = isinstance(kernel, JITFunction) and torch.version.hip is None
        self._signatures: dict[tuple[Any, ...], CallSignature] = {}
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the jitted kernel."""
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return a function that launches the kernel on this grid."""
        if compiles_only():
            return partial(self._compile, grid)
        if self._can_bypass and launches_directly():
            return partial(self._launch, (*grid, 1, 1)[:3])
        return partial(self.kernel[grid], **OPTIONS)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> Launch | None:
        bind_context()
        values = (*arguments, *named.values())
        types = (*named, *map(type, values))
        signature = self._signatures.get(types)
        if signature is None:
            signature = self._signatures[types] = self._signature_of(arguments, named)
        in_order = signature.in_order(values)
        ordered, bits, wide = list(in_order), 0, 0
        device = driver.active.get_current_device()
        key = [types, device, *[values[i] for i in signature.constants]]
        for i in signature.tensors:
            key.append(ordered[i].dtype)
            ordered[i] = pointer = ordered[i].data_ptr()
            bits |= pointer
        if bits & 15:
            key.append(tuple(ordered[i] & 15 == 0 for i in signature.tensors))
        for i in signature.descriptors:
            key.append(kind_of(ordered[i]))
        for i in signature.sizes:
            wide |= ordered[i] >> 31
        for i in signature.special:
            size = ordered[i]
            wide |= size >> 31
            key.append((size == 1, size % 16 == 0))
        for i in signature.strides:
            for size in ordered[i]:
                wide |= size >> 31
                key.append((size == 1, size % 16 == 0))
        for i in signature.tables:
            key += [(x.dtype, x.data_ptr() & 15 == 0) for x in ordered[i]]
            ordered[i] = tuple([x.data_ptr() for x in ordered[i]])
        if wide:
            self.kernel[grid](*arguments, **named, **OPTIONS)
            return _record_launch(None)
        kind = tuple(key)
        compiled = self._compiled.get(kind)
        if compiled is None:
            compiled = self._compiled[kind] = self.kernel[grid](*arguments, **named, **OPTIONS)
        else:
            run(compiled, grid, ordered, device)
        return _record_launch(Launch(compiled, grid, in_order, self.kernel.arg_names))

    def _compile(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Compile the kernel of a launch, without the launch."""
        self.kernel.warmup(*arguments, grid=grid, **named, **OPTIONS)

    def _signature_of(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> CallSignature:
        """Sort the arguments of a call by type; anything else that Triton may specialize on counts as a constant."""
        names = [*self.kernel.arg_names[: len(arguments)], *named]
        runtime = {param.name: param for param in self.kernel.params if not param.is_constexpr}
        found: dict[str, list[int]] = {field: [] for field in CallSignature._fields[1:]}
        for i, (name, x) in enumerate(zip(names, (*arguments, *named.values()), strict=True)):
            param = runtime.get(name)
            if param is None:
                found["constants"].append(i)
            elif isinstance(x, Tensor):
                found["tensors"].append(param.num)
            elif type(x) in DESCRIPTORS:
                found["descriptors"].append(param.num)
            elif type(x) is int:
                found["sizes" if param.do_not_specialize else "special"].append(param.num)
            elif isinstance(x, tuple):
                found["tables" if isinstance(x[0], Tensor) else "strides"].append(param.num)
            elif type(x) is not float:
                found["constants"].append(i)
        order = itemgetter(*[names.index(name) for name in self.kernel.arg_names])
        return CallSignature(order, *[tuple(positions) for positions in found.values()])


class Launch(NamedTuple):
    """A launched kernel."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # in the order of the kernel's parameters
    names: Sequence[str] = ()  # names of the kernel's parameters


def _record_launch(launch: Launch | None) -> Launch | None:
    """Append a launch to this thread's recording, if there is one; None means that the launch cannot be repeated."""
    launches = recorded_launches()
    if launches is not None:
        launches.append(launch)
    return launch


def recorded_launches() -> list[Launch | None] | None:
    """Return the launches of this thread since recording began; None if it is not recording."""
    return _thread.launches


@contextmanager
def recording_launches() -> Iterator[list[Launch | None]]:
    """Record every launch of this thread, in order. Recordings cannot be nested."""
    found: list[Launch | None] = []
    _thread.launches = found
    try:
        yield found
    finally:
        _thread.launches = None


@contextmanager
def compiling_only() -> Iterator[None]:
    """Compile the kernels of this thread's launches, and launch none. Their results are not written."""
    _thread.compiles_only = True
    try:
        yield
    finally:
        _thread.compiles_only = False


def compiles_only() -> bool:
    """Return whether this thread's launches are compiled only."""
    return _thread.compiles_only


def run(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], device: int) -> None:
    """Start a compiled kernel on the current stream; tensors may be given as addresses."""
    if has_launch_hooks():
        compiled[grid](*arguments)
        return
    stream = driver.active.get_current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def is_watched() -> bool:
    """Return whether launches of this thread are recorded, compiled only, or seen by a profiler."""
    if _thread.launches is not None or _thread.compiles_only:
        return True
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def has_launch_hooks() -> bool:
    """Return whether a profiler has hooked into launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


class _Thread(threading.local):
    """State of a thread. Its defaults are attributes of the class, because a missing attribute is slow to look up."""

    launches: list[Launch | None] | None = None
    compiles_only = False
    bound = False


_thread = _Thread()


def bind_context() -> None:
    """Give this thread a CUDA context, because encoding a TMA descriptor needs one but does not create it."""
    if not _thread.bound:
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().query()
        _thread.bound = True


def kernel_launcher(kernel: Any) -> Any:
    """Decorate a jitted kernel that is launched by the host."""
    return KernelLauncher(kernel)


def kind_of(descriptor: Any) -> Any:
    """Return what a kernel is specialized on for a descriptor."""
    known = vars(descriptor).get("kind")
    if known is None:
        block, layout = tuple(descriptor.block_shape), getattr(descriptor, "layout", None)
        known = (str(descriptor.base.dtype), block, str(layout))
    return known
