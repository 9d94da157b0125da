# SPDX-License-Identifier: Apache-2.0
"""Record a call's allocations and kernel launches, with gaps for the addresses of tensors; see `launch_cache`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from dynaxx.kernels.runtime.launch_list import LaunchList, Place, Sizes, launch_list
from dynaxx.kernels.runtime.launcher import Launch, recording_launches

ALIGNMENT = 256  # bytes, alignment of tensors in one scratch allocation

Inputs = tuple["Tensor | None", ...]


class Recording(NamedTuple):
    """Allocations and launches of a call. Tensors are numbered: inputs, then results, then one scratch allocation."""

    launches: LaunchList | None
    results: tuple[tuple[torch.Size, torch.dtype], ...]
    scratch: int  # bytes
    stream: Callable[[int], int] = int  # returns the current stream of a GPU

    def start(self, addresses: list[int], index: int, sizes: list[int]) -> tuple[Tensor, ...] | None:
        """Allocate the results, launch the kernels, and return the results; None in another CUDA context.

        Args:
            addresses: address of each persistent input, 0 if it is missing, and of each tensor of the call.
            index: index of the GPU.
            sizes: `flat_sizes` of the call.
        """
        assert self.launches is not None, "the caller asks for recordings that can be replayed"
        found, _scratch = self._allocate(addresses, index)
        return found if self.launches.run(self.stream(index), addresses, sizes) else None

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


CALLED_ONCE = Recording(None, (), -1)
NOT_REPLAYABLE = Recording(None, (), -2)  # the call does more than a replay can repeat, or there are no launch lists


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
    place_of = lambda x: _place_in_made(x, places) or _place_in_given(x, given)
    together = launch_list(launches, place_of, sizes)
    kinds = tuple((x.shape, x.dtype) for x in results)
    return None if together is None else Recording(together, kinds, size, driver.active.get_current_stream)


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
