# SPDX-License-Identifier: Apache-2.0
"""The cache of launches: repeat a call's allocations and kernel launches for other tensors of the same shapes.

Computing a kernel's arguments on the host takes longer than a short call runs on the GPU. The second call of a kind is
therefore recorded, with gaps for addresses, and later calls replay the recording. The first call is not recorded,
because it may be the only one: a growing cache has new shapes at every step.

    call over a layout        one kernel, which layers, training steps and requests of one length repeat
    call over a cache         a decode step: allocations and a few short kernels
    call over a rule          a selection of blocks, alone or with the attention over it
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor
from triton.runtime import driver

from dynaxx.kernels.device import interpreted
from dynaxx.kernels.runtime.launch_list import Sizes, flat_sizes
from dynaxx.kernels.runtime.launcher import bind_context, is_watched
from dynaxx.kernels.runtime.recorder import CALLED_ONCE, NOT_REPLAYABLE, Recording, record
from dynaxx.layout import BlockLayout
from dynaxx.layout.derived import PerLayout

MAX_CALLS = 1024  # cached recordings of all forms; as many for each layout without a form

RecordedCall = Callable[..., "tuple[Tensor, ...] | None"]
Entries = dict[tuple[Any, ...], Recording]
Tensors = tuple["Tensor | None", ...]


class PersistentInputs(Protocol):
    """Inputs that persist from call to call, in addition to the tensors of each call: a layout, a cache, or a rule."""

    @property
    def form(self) -> Hashable | None:
        """Return a key. Equal keys imply equal launches, except for addresses and the contents of tensors.

        Only a `BlockLayout` may return None: its recordings are kept with it, and not shared.
        """

    @property
    def kernel_inputs(self) -> tuple[Tensor | None, ...]:
        """Return every tensor that a call reads, each in the same place at every call.

        The last ones are None until they are computed.
        """


def record_or_replay(
    call: RecordedCall,
    inputs: PersistentInputs,
    tensors: Tensors,
    *settings: Any,
    made: int = 0,
    split: dict[str, Any] | None = None,
    at_once: bool = False,
    sizes: Sizes | None = None,
    replayed: list[Recording] | None = None,
) -> Any:
    """Return `call(inputs, *tensors, *settings)`, by replaying its launches if a call of these shapes was recorded.

    Args:
        call: function that allocates with `torch.empty` and similar, takes views, and launches kernels of
            `kernel_launcher`; functions that do anything else are not replayed. It must return dense tensors that it
            allocated, or nothing, and read no tensors other than its arguments.
        inputs: the persistent inputs.
        tensors: tensors of this call; their shapes, strides and dtypes are part of the key.
        *settings: hashable values, each always of the same type.
        made: number of tensors at the end of `tensors` that are dense, with shapes and dtypes implied by the others.
        split: result of `SplitLines.to(...)`, which `call` receives after the settings.
        at_once: whether to record the first call already, because others follow, such as those of a step's layers.
        sizes: arguments of the kernels, integers or NamedTuples of integers by the names of their parameters, that may
            differ between calls of one recording, such as the strides of a growing cache. Everything else must follow
            from the key.
        replayed: list to which the recording is added if this call replays it, and `replay` may repeat it.
    """
    given = (*tensors, *settings) if split is None else (*tensors, *settings, split)
    persistent = inputs.kernel_inputs
    device = -1 if persistent[0] is None else persistent[0].get_device()
    if is_watched() or (device < 0 and interpreted()):
        return call(inputs, *given)
    bind_context()
    if device >= 0 and device != driver.active.get_current_device():
        with torch.cuda.device(device):  # `replay` needs the caller's device, so nothing is added to `replayed`
            return record_or_replay(
                call, inputs, tensors, *settings, made=made, split=split, at_once=at_once, sizes=sizes
            )

    flags: tuple[Any, ...] = ()
    if split is not None:
        flags = tuple([x for x in split.values() if not isinstance(x, Tensor)])
        tensors = (*[x for x in split.values() if isinstance(x, Tensor)], *tensors)
    specialized = _specialized(sizes) if sizes else []
    if specialized is None:
        return call(inputs, *given)

    addresses, bits = _addresses(persistent, tensors)
    alignment = tuple([address & 15 for address in addresses]) if bits & 15 else ()
    forms = _forms(tensors[:-made] if made else tensors)
    form = inputs.form
    key = (call, form, device, persistent[-1] is None, *settings, *flags, *forms, alignment, *specialized)
    entries: Entries = _by_layout.of(inputs) if form is None and isinstance(inputs, BlockLayout) else recordings
    known = entries.get(key)

    if known is None and not at_once:
        _keep(entries, key, CALLED_ONCE)
        return call(inputs, *given)
    if known is None or known is CALLED_ONCE:
        read = (*persistent, *(x for x in tensors if x is not None))
        results, recording = record(lambda: call(inputs, *given), read, sizes or {})
        _keep(entries, key, recording)
        return results
    if known is NOT_REPLAYABLE:
        return call(inputs, *given)
    if replayed is not None and not bits & 15:
        replayed.append(known)
    results = known.start(addresses, device, flat_sizes(sizes) if sizes else [])
    return call(inputs, *given) if results is None else results


def _keep(entries: Entries, key: tuple[Any, ...], recording: Recording) -> None:
    """Keep the recording of a key, and no more than `MAX_CALLS` of them."""
    if len(entries) >= MAX_CALLS and key not in entries:
        entries.clear()
    entries[key] = recording


def _forms(tensors: Tensors) -> list[Any]:
    """Return shape, strides and dtype of each tensor, and None for each missing one."""
    found: list[Any] = []
    for x in tensors:
        found += (None,) if x is None else (x.shape, x.stride(), x.dtype)
    return found


def _specialized(sizes: Sizes) -> list[tuple[bool, bool]] | None:
    """Return the properties of each size for which Triton compiles a kernel of its own; None beyond 32 bits."""
    found: list[tuple[bool, bool]] = []
    for chosen in sizes.values():
        for size in chosen if isinstance(chosen, tuple) else (chosen,):
            if size >> 31:
                return None
            found.append((size == 1, size % 16 == 0))
    return found


def replay(
    recording: Recording, persistent: Tensors, tensors: Tensors, sizes: Sizes | None = None
) -> tuple[Tensor, ...] | None:
    """Replay a recording that `record_or_replay` found for a call of the same key, without making the key again.

    Args:
        recording: the recording.
        persistent: the persistent inputs.
        tensors: tensors of this call.
        sizes: see `record_or_replay`.

    Returns:
        The results; None if the call must go through `record_or_replay`: addresses that are no multiples of 16 bytes,
        another device than the current one, or a thread that records, compiles, is profiled, or has another CUDA
        context.
    """
    addresses, bits = _addresses(persistent, tensors)
    device = -1 if persistent[0] is None else persistent[0].get_device()
    if bits & 15 or is_watched() or device != driver.active.get_current_device():
        return None
    bind_context()
    return recording.start(addresses, device, flat_sizes(sizes) if sizes else [])


def _addresses(persistent: Tensors, tensors: Tensors) -> tuple[list[int], int]:
    """Return the address of each persistent input, 0 if it is missing, and of each tensor; and the bits of all."""
    addresses, bits = [0 if x is None else x.data_ptr() for x in persistent], 0
    addresses += [x.data_ptr() for x in tensors if x is not None]
    for address in addresses:
        bits |= address
    return addresses, bits


recordings: Entries = {}
_by_layout = PerLayout(by_form=False)
