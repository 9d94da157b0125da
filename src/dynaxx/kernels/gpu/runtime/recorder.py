# SPDX-License-Identifier: Apache-2.0
"""Record a call's allocations and kernel launches, and replay them for later calls of the same shapes.

A decode step or a selection of blocks consists of a few short kernels. Computing their arguments on the host takes
longer than they run. The second call of a kind is therefore recorded, with gaps for tensors, and later calls replay the
recording. The first call is not recorded, because it may be the only one: a growing cache has new shapes at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from dynaxx.kernels.gpu.device import interpreted
from dynaxx.kernels.gpu.runtime.launcher import (
    DESCRIPTORS,
    Launch,
    bind_context,
    compiles_only,
    direct_launcher,
    has_launch_hooks,
    recorded_launches,
    recording_launches,
)

MOST_CALLS = 1024  # cached recordings
ALIGNMENT = 256  # bytes, alignment of tensors in one scratch allocation

RecordedCall = Callable[..., tuple[Tensor, ...]]
Sizes = Mapping[str, "int | tuple[int, ...]"]
Place = tuple[int, int]  # a number of a tensor, see `Recording`, and an offset in bytes


class RecordedInputs(Protocol):
    """Inputs that persist from call to call, in addition to the tensors of each call: a cache, or a prepared rule."""

    @property
    def k(self) -> Tensor:
        """Return one of the tensors, to find the device."""

    @property
    def form(self) -> Hashable:
        """Return a key. Equal keys imply equal launches, except for addresses and the contents of tensors."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a call reads."""


def record_or_replay(
    call: RecordedCall,
    cache: RecordedInputs,
    tensors: tuple[Tensor | None, ...],
    *settings: Any,
    at_once: bool = False,
    sizes: Sizes | None = None,
) -> Any:
    """Return `call(cache, *tensors, *settings)`, by replaying its launches if a call of these shapes was recorded.

    Args:
        call: function that allocates with `torch.empty` and similar, takes views, and launches kernels of
            `kernel_launcher`; functions that do anything else are not replayed. It must return dense tensors that it
            allocated, and read no tensors other than its arguments.
        cache: the persistent inputs.
        tensors: tensors of this call; their shapes, strides and dtypes are part of the key.
        *settings: hashable values, each always of the same type.
        at_once: whether to record the first call already, because others follow, such as those of a step's layers.
        sizes: arguments of the kernels, integers or NamedTuples of integers by the names of their parameters, that may
            differ between calls of one recording, such as the strides of a growing cache. Everything else must follow
            from the key.
    """
    device = cache.k.get_device()
    if recorded_launches() is not None or has_launch_hooks() or compiles_only() or (device < 0 and interpreted()):
        return call(cache, *tensors, *settings)
    bind_context()
    if device >= 0 and device != driver.active.get_current_device():
        with torch.cuda.device(device):
            return record_or_replay(call, cache, tensors, *settings, at_once=at_once, sizes=sizes)
    key: list[Any] = [call, cache.form, *settings]
    addresses, bits = [x.data_ptr() for x in cache.tensors], 0
    for x in tensors:
        if x is None:
            key.append(None)
        else:
            key += (x.shape, x.stride(), x.dtype)
            addresses.append(x.data_ptr())
    for address in addresses:
        bits |= address
    if bits & 15:
        key.append(tuple([address & 15 for address in addresses]))
    for given in sizes.values() if sizes else ():
        for size in given if isinstance(given, tuple) else (given,):
            if size >> 31:
                return call(cache, *tensors, *settings)
            key.append((size == 1, size % 16 == 0))  # what Triton specializes kernels on
    found = tuple(key)
    known = _kept.get(found)
    if known is None:
        if len(_kept) >= MOST_CALLS:
            _kept.clear()
        _kept[found] = CALLED_ONCE
    if known is CALLED_ONCE or (known is None and at_once):
        return _record(found, call, cache, tensors, settings, addresses, sizes or {})
    if known is None or known is NOT_REPLAYABLE:
        return call(cache, *tensors, *settings)
    return known.start(addresses, device, cache.k.device, sizes)


class RecordedLaunch(NamedTuple):
    """One launch of a recording. Its addresses are those of numbered tensors, see `Recording`."""

    start: Callable[..., None]
    arguments: list[Any]  # all arguments of `start`: the grid, None for the stream, ..., with None for each address
    addresses: tuple[tuple[int, int, int], ...]  # (position, tensor, offset in bytes)
    tables: tuple[tuple[int, tuple[Place, ...]], ...]  # (position, places) of each NamedTuple of tensors
    descriptors: tuple[
        tuple[int, int, int, Callable[[Any, int], Any]], ...
    ]  # as addresses, and a function to encode it
    sizes: tuple[tuple[int, str], ...]  # (position, name) of each size of the call


STREAM = 3  # position of the stream in the arguments of a launch, after the grid


class Recording(NamedTuple):
    """Allocations and launches of a call. Tensors are numbered: inputs, then results, then one scratch allocation."""

    launches: tuple[RecordedLaunch, ...]
    results: tuple[tuple[torch.Size, torch.dtype], ...]
    scratch: int  # bytes

    def start(self, addresses: list[int], index: int, device: torch.device, sizes: Sizes | None) -> tuple[Tensor, ...]:
        """Allocate the results, launch the kernels, and return the results."""
        found = tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results])
        for x in found:
            addresses.append(x.data_ptr())
        scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device) if self.scratch else None
        if scratch is not None:
            addresses.append(scratch.data_ptr())
        stream = driver.active.get_current_stream(index)
        for start, template, gaps, tables, descriptors, varying in self.launches:
            arguments = template.copy()
            arguments[STREAM] = stream
            for at, which, offset in gaps:
                arguments[at] = addresses[which] + offset
            for at, places in tables:
                arguments[at] = tuple([addresses[which] + offset for which, offset in places])
            for at, which, offset, encoded in descriptors:
                arguments[at] = encoded(None, addresses[which] + offset)
            if sizes is not None:
                for at, name in varying:
                    arguments[at] = sizes[name]
            start(*arguments)
        return found


CALLED_ONCE = Recording((), (), -1)
NOT_REPLAYABLE = Recording((), (), -2)  # the call does more than a replay can repeat
_kept: dict[tuple[Any, ...], Recording] = {}


def _record(
    key: tuple[Any, ...],
    call: RecordedCall,
    cache: RecordedInputs,
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
    addresses: list[int],
    sizes: Sizes,
) -> tuple[Tensor, ...]:
    """Run a call and cache its recording, unless two inputs share an address, which would be ambiguous."""
    there = [address for address in addresses if address]  # empty tensors have none
    if len(set(there)) < len(there):
        return call(cache, *tensors, *settings)
    with Allocations() as allocations, recording_launches() as launches:
        results = call(cache, *tensors, *settings)
    given = (*cache.tensors, *(x for x in tensors if x is not None))
    _kept[key] = _recording_of(launches, allocations, given, results, sizes) or NOT_REPLAYABLE
    return results


class Allocations(TorchDispatchMode):
    """Collect allocated tensors, and notice any operation that is neither an allocation nor a view."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []  # kept alive, so that no memory is reused during the recording
        self.are_all = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in EMPTY:
            self.made.append(found)
        elif func._schema.is_mutable:
            self.are_all = False
        elif any(isinstance(x, Tensor) for x in (*args, found)):  # ops on dtypes alone also arrive here
            self.are_all &= _memory(found) == _memory(args[0]) != 0
        return found


EMPTY = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")}


def _memory(x: Any) -> int:
    return x.untyped_storage()._cdata if isinstance(x, Tensor) else 0


def _recording_of(
    launches: Sequence[Launch | None],
    allocations: Allocations,
    given: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    sizes: Sizes,
) -> Recording | None:
    """Return the recording; None if the call did more than launch kernels on its inputs and allocations."""
    if not launches or not allocations.are_all:
        return None
    places: dict[int, Place] = {}  # by allocated memory: (tensor, offset in bytes)
    for i, x in enumerate(results):
        if _memory(x) not in map(_memory, allocations.made) or x.storage_offset() or not x.is_contiguous():
            return None
        places[_memory(x)] = (len(given) + i, 0)
    if len(places) < len(results):
        return None
    size = 0
    for x in allocations.made:
        if _memory(x) not in places:
            places[_memory(x)] = (len(given) + len(results), size)
            size += math.ceil(x.untyped_storage().nbytes() / ALIGNMENT) * ALIGNMENT
    places_of = lambda x: _place_in_made(x, places) or _place_in_given(x, given)
    recorded = [_recorded_launch(launch, places_of, sizes) for launch in launches]
    if None in recorded:
        return None
    return Recording(tuple(filter(None, recorded)), tuple((x.shape, x.dtype) for x in results), size)


def _recorded_launch(
    launch: Launch | None, place_of: Callable[[Tensor], Place | None], sizes: Sizes
) -> RecordedLaunch | None:
    """Return a launch with gaps for addresses and sizes; None if it reads other tensors than those with a place."""
    if launch is None:
        return None
    compiled, below = launch.compiled, direct_launcher(launch.compiled, launch.grid)
    if below is None:
        start = compiled.run
        arguments = [*launch.grid, None, compiled.function, compiled.packed_metadata, None, None, None]
    else:
        start = below.launch
        arguments = [*launch.grid, None, below.function, *below.between]
    gaps: list[tuple[int, int, int]] = []
    tables: list[tuple[int, tuple[Place, ...]]] = []
    descriptors: list[tuple[int, int, int, Callable[[Any, int], Any]]] = []
    varying: list[tuple[int, str]] = []
    for name, x in zip(launch.names, launch.arguments, strict=True):
        described, of_tensors = type(x) in DESCRIPTORS, isinstance(x, tuple) and isinstance(x[0], Tensor)
        if not (described or of_tensors or isinstance(x, Tensor)):
            if name in sizes:
                varying.append((len(arguments), name))
                if x != sizes[name]:
                    return None
            arguments.append(x)
            continue
        places = [place_of(each) for each in (x if of_tensors else (x.base if described else x,))]
        there = [place for place in places if place is not None]
        if len(there) < len(places) or (described and below is None):
            return None
        if of_tensors:
            tables.append((len(arguments), tuple(there)))
        elif described:
            assert below is not None, "checked above"
            descriptors.append((len(arguments), *there[0], below.described(x, len(descriptors))))
        else:
            gaps.append((len(arguments), *there[0]))
        arguments += (None, *x.shape, *x.strides) if described else (None,)
    return RecordedLaunch(start, arguments, tuple(gaps), tuple(tables), tuple(descriptors), tuple(varying))


def _place_in_made(x: Tensor, places: dict[int, Place]) -> Place | None:
    place = places.get(_memory(x))
    return None if place is None else (place[0], place[1] + int(x.storage_offset()) * x.element_size())


def _place_in_given(x: Tensor, given: tuple[Tensor, ...]) -> Place | None:
    """Return (tensor, offset in bytes) of a view of an input; None if it is ambiguous."""
    for i, own in enumerate(given):
        if own.data_ptr() == x.data_ptr():
            return i, 0
    owners = [i for i, own in enumerate(given) if _memory(own) == _memory(x)]
    return (owners[0], x.data_ptr() - given[owners[0]].data_ptr()) if len(owners) == 1 else None
