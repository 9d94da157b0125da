# SPDX-License-Identifier: Apache-2.0
"""Record a call's allocations and kernel launches, with gaps for the addresses of tensors; see `launch_cache`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from dynaxx.kernels.compat import direct_launcher, encoded_map
from dynaxx.kernels.runtime.arguments import rebased
from dynaxx.kernels.runtime.launch_list import LaunchList, launch_list
from dynaxx.kernels.runtime.launcher import DESCRIPTORS, Launch, recording_launches

ALIGNMENT = 256  # bytes, alignment of tensors in one scratch allocation
MAX_ADDRESSES = 256  # cached encodings per descriptor

Sizes = Mapping[str, "int | tuple[int, ...]"]
Inputs = tuple["Tensor | None", ...]
Addresses = Callable[[list[int]], tuple[int, ...]]
Encode = Callable[[Any, int], Any]  # (inputs, address) -> the encoded argument
Place = tuple[int, int]  # a number of a tensor, see `Recording`, and an offset in bytes


class RecordedLaunch(NamedTuple):
    """One launch of a recording. Its addresses are those of numbered tensors, see `Recording`."""

    start: Callable[..., None]
    arguments: list[Any]  # all arguments of `start`: the grid, None for the stream, ..., with None for each address
    addresses: tuple[tuple[int, int, int], ...]  # (position, tensor, offset in bytes)
    tables: tuple[tuple[int, Addresses], ...]  # (position, function from all addresses to those) of each NamedTuple
    descriptors: tuple[tuple[int, int, int, Encode], ...]  # as addresses, and a function to encode it
    sizes: tuple[tuple[int, str], ...]  # (position, name) of each size of the call


STREAM = 3  # position of the stream in the arguments of a launch, after the grid


class Recording(NamedTuple):
    """Allocations and launches of a call. Tensors are numbered: inputs, then results, then one scratch allocation."""

    launches: tuple[RecordedLaunch, ...]
    results: tuple[tuple[torch.Size, torch.dtype], ...]
    scratch: int  # bytes
    together: LaunchList | None = None  # the launches as one call
    stream: Callable[[int], int] = int  # returns the current stream of a GPU

    def start(
        self, addresses: list[int], index: int, inputs: Inputs, tensors: Inputs, sizes: Sizes | None
    ) -> tuple[Tensor, ...]:
        """Allocate the results, launch the kernels, and return the results.

        Args:
            addresses: address of each persistent input, 0 if it is missing, and of each tensor of the call.
            index: index of the GPU.
            inputs: the persistent inputs.
            tensors: tensors of the call.
            sizes: see `record_or_replay`.
        """
        found, _scratch = self._allocate(addresses, index)
        stream = driver.active.get_current_stream(index)
        if self.together is not None and self.together.run(stream, addresses, flat_sizes(sizes) if sizes else []):
            return found
        for start, template, gaps, tables, descriptors, varying in self.launches:
            arguments = template.copy()
            arguments[STREAM] = stream
            for at, which, offset in gaps:
                arguments[at] = addresses[which] + offset
            for at, addresses_of in tables:
                arguments[at] = addresses_of(addresses)
            for at, which, offset, encoded in descriptors:
                arguments[at] = encoded((inputs, tensors), addresses[which] + offset)
            if sizes is not None:
                for at, name in varying:
                    arguments[at] = sizes[name]
            start(*arguments)
        return found

    def repeat(self, addresses: list[int], index: int, sizes: list[int]) -> tuple[Tensor, ...] | None:
        """Start the kernels as `start` does, if they are one list; None if this thread must call `start`.

        Args:
            addresses: see `start`.
            index: index of the GPU.
            sizes: all integers of the call's sizes.
        """
        if self.together is None:
            return None
        found, _scratch = self._allocate(addresses, index)
        return found if self.together.run(self.stream(index), addresses, sizes) else None

    def _allocate(self, addresses: list[int], index: int) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the results, and scratch memory that must live until the launch; append their addresses."""
        if not self.results and not self.scratch:
            return (), None
        device = _CPU if index < 0 else _device(index)
        found = tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results])
        addresses += [x.data_ptr() for x in found]
        if not self.scratch:
            return found, None
        scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
        addresses.append(scratch.data_ptr())
        return found, scratch


_CPU = torch.device("cpu")


@lru_cache(maxsize=64)
def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


CALLED_ONCE = Recording((), (), -1)
NOT_REPLAYABLE = Recording((), (), -2)  # the call does more than a replay can repeat


def record(
    call: Callable[[], tuple[Tensor, ...] | None], given: Inputs, sizes: Sizes
) -> tuple[tuple[Tensor, ...] | None, Recording]:
    """Run a call; return its results and its recording.

    Args:
        call: see `record_or_replay`.
        given: the persistent inputs, and the tensors of the call.
        sizes: see `record_or_replay`.
    """
    there = [id(x) for x in given if x is not None]
    if len(set(there)) < len(there):
        return call(), CALLED_ONCE  # one tensor is two inputs: its arguments do not tell which
    with Allocations() as allocations, recording_launches() as launches:
        results = call()
    return results, _recording_of(launches, allocations, given, results or (), sizes) or NOT_REPLAYABLE


class Allocations(TorchDispatchMode):
    """Collect allocated tensors, and notice any operation that is neither an allocation nor a view."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []  # kept alive, so that no memory is reused during the recording
        self.are_all = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch, and record what it allocates."""
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
    given: Inputs,
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
    recorded = [_recorded_launch(launch, places_of, len(given), sizes) for launch in launches]
    if None in recorded:
        return None
    names = [name for name, x in sizes.items() for _ in (x if isinstance(x, tuple) else (x,))]
    together = launch_list([launch for launch in launches if launch], places_of, names)
    kinds = tuple((x.shape, x.dtype) for x in results)
    return Recording(tuple(filter(None, recorded)), kinds, size, together, driver.active.get_current_stream)


def flat_sizes(sizes: Sizes) -> list[int]:
    """Return all integers of a call's sizes, in order."""
    found: list[int] = []
    for x in sizes.values():
        found += x if isinstance(x, tuple) else (x,)
    return found


def _recorded_launch(
    launch: Launch | None, place_of: Callable[[Tensor], Place | None], given: int, sizes: Sizes
) -> RecordedLaunch | None:
    """Return a launch with gaps for addresses and sizes; None if it reads other tensors than those with a place.

    Args:
        launch: the launch.
        place_of: function that returns the place of a tensor.
        given: number of inputs.
        sizes: see `record_or_replay`.
    """
    if launch is None:
        return None
    template = _Template(launch, given)
    for name, x in zip(launch.names, launch.arguments, strict=True):
        if type(x) in DESCRIPTORS:
            place = place_of(x.base)
            if place is None or not template.add_descriptor(x, place):
                return None
        elif isinstance(x, Tensor):
            place = place_of(x)
            if place is None:
                return None
            template.add_address(place)
        elif isinstance(x, tuple) and isinstance(x[0], Tensor):
            places = [place for place in map(place_of, x) if place is not None]
            if len(places) < len(x):
                return None
            template.add_table(places)
        elif name not in sizes:
            template.arguments.append(x)
        elif x == sizes[name]:
            template.add_size(name, x)
        else:
            return None
    return template.done()


class _Template:
    """The arguments of a launch under construction, with gaps for addresses, descriptors and sizes."""

    def __init__(self, launch: Launch, given: int) -> None:
        compiled = launch.compiled
        self._given, self._below = given, direct_launcher(compiled)
        if self._below is None:
            self._start = compiled.run
            between = (compiled.function, compiled.packed_metadata, None, None, None)
        else:
            self._start, between, _ = self._below
        self.arguments: list[Any] = [*launch.grid, None, *between]
        self._addresses: list[tuple[int, int, int]] = []
        self._tables: list[tuple[int, Addresses]] = []
        self._descriptors: list[tuple[int, int, int, Encode]] = []
        self._sizes: list[tuple[int, str]] = []

    def add_address(self, place: Place) -> None:
        """Add the address of a tensor."""
        self._addresses.append((len(self.arguments), *place))
        self.arguments.append(None)

    def add_table(self, places: list[Place]) -> None:
        """Add a NamedTuple of tensors."""
        self._tables.append((len(self.arguments), _addresses_at(places)))
        self.arguments.append(None)

    def add_size(self, name: str, x: Any) -> None:
        """Add a size that may differ in later calls."""
        self._sizes.append((len(self.arguments), name))
        self.arguments.append(x)

    def add_descriptor(self, x: Any, place: Place) -> bool:
        """Add the descriptor of a tensor; return whether it can be encoded again for other tensors."""
        which, offset = place
        encode: Encode
        if self._below is not None:
            encode = _encoder(rebased(x, None), self._below.maps[len(self._descriptors)])
        elif which < self._given and not offset:  # Triton encodes a descriptor of an input itself
            encode = partial(_rebased, rebased(x, None), which)
        else:
            return False
        self._descriptors.append((len(self.arguments), which, offset, encode))
        self.arguments += (None,) if self._below is None else (None, *x.shape, *x.strides)
        return True

    def done(self) -> RecordedLaunch:
        """Return the launch."""
        return RecordedLaunch(
            self._start,
            self.arguments,
            tuple(self._addresses),
            tuple(self._tables),
            tuple(self._descriptors),
            tuple(self._sizes),
        )


def _encoder(template: Any, meta: dict[str, Any]) -> Encode:
    """Return a function that encodes a descriptor without data, for the data at an address."""
    known: dict[int, Any] = {}

    def encoded(inputs: Any, address: int) -> Any:
        found = known.get(address)
        if found is None:
            if len(known) >= MAX_ADDRESSES:
                known.clear()
            found = known[address] = encoded_map(address, template, meta)
        return found

    return encoded


def _addresses_at(places: list[Place]) -> Addresses:
    """Return a function from the addresses of all tensors to those of some places."""
    if len(places) > 1 and not any(offset for _, offset in places):
        return itemgetter(*[which for which, _ in places])
    return lambda addresses: tuple([addresses[which] + offset for which, offset in places])


def _place_in_made(x: Tensor, places: dict[int, Place]) -> Place | None:
    place = places.get(_memory(x))
    return None if place is None else (place[0], place[1] + int(x.storage_offset()) * x.element_size())


def _place_in_given(x: Tensor, given: Inputs) -> Place | None:
    """Return (tensor, offset in bytes) of an input or a view of one; None if it is ambiguous."""
    for i, own in enumerate(given):
        if own is x:
            return i, 0
    there = [(i, own) for i, own in enumerate(given) if own is not None]
    for owners in (
        [(i, own) for i, own in there if own.data_ptr() == x.data_ptr()],
        [(i, own) for i, own in there if _memory(own) == _memory(x)],
    ):
        if owners:
            (i, own), *others = owners
            return None if others else (i, x.data_ptr() - own.data_ptr())
    return None


def _rebased(template: Any, number: int, given: tuple[Inputs, Inputs], address: int) -> Any:
    inputs, tensors = given
    x = inputs[number] if number < len(inputs) else [x for x in tensors if x is not None][number - len(inputs)]
    return rebased(template, x)
