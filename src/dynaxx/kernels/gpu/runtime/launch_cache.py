# SPDX-License-Identifier: Apache-2.0
"""Cache of launches over a layout: equal layout, shapes and strides give the same launch with other addresses.

On the host, computing a kernel's arguments from a layout and shapes takes longer than a short call runs on the GPU. The
arguments are therefore cached with the layout, which layers, training steps and requests of one length share. Layouts
from selections, which differ at every call, share one cache entry if their `BlockLayout.form` is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from dynaxx.kernels.gpu.runtime.arguments import rebased
from dynaxx.kernels.gpu.runtime.launcher import (
    DESCRIPTORS,
    Launch,
    bind_context,
    direct_launcher,
    has_launch_hooks,
    recorded_launches,
    run,
)
from dynaxx.layout import BlockLayout
from dynaxx.layout.derived import PerLayout

MOST_LAUNCHES = 64  # cached launches per layout


Getter = Callable[[BlockLayout], Tensor]


class CachedLaunch(NamedTuple):
    """A compiled launch whose tensor arguments are filled in at every call."""

    start: Callable[[list[Any], int], None]  # (arguments, device)
    arguments: list[Any]  # arguments of `start`, with None for each tensor
    owned: tuple[tuple[int, Getter], ...]  # (position, getter of a tensor of the layout)
    tables: tuple[tuple[int, tuple[Getter, ...]], ...]  # (position, getters of the tensors of a NamedTuple)
    pointers: tuple[tuple[int, int], ...]  # (position, index of a tensor of the call)
    descriptors: tuple[tuple[int, int, Callable[[Tensor, int], Any]], ...]  # (position, index, function to encode it)


StartKernel = Callable[..., Launch | None]


def launch_cached(
    start: StartKernel,
    layout: BlockLayout,
    tensors: tuple[Tensor, ...],
    *settings: Any,
    made: int = 0,
    split: dict[str, Any] | None = None,
) -> None:
    """Call `start(layout, *tensors, *settings)`, which launches one kernel; from the third call on, only launch it.

    Args:
        start: function that launches one kernel and returns its `Launch`.
        layout: a layout, whose tensors may be arguments of the kernel.
        tensors: tensors of the call; their shapes, strides and dtypes are part of the cache key.
        *settings: hashable values, part of the cache key.
        made: number of tensors at the end of `tensors` that are dense, with shapes and dtypes implied by the others.
        split: result of `SplitLines.to(...)`, which `start` receives after the settings.
    """
    bind_context()
    device = tensors[0].get_device()
    if device >= 0 and device != driver.active.get_current_device():
        with torch.cuda.device(device):
            launch_cached(start, layout, tensors, *settings, made=made, split=split)
        return
    given = (layout, *tensors, *settings) if split is None else (layout, *tensors, *settings, split)
    if recorded_launches() is not None:  # the recording will repeat it
        start(*given)
        return
    key: list[Any] = [start, device, *settings]
    if split is not None:
        key += [x for x in split.values() if not isinstance(x, Tensor)]
        tensors = (*[x for x in split.values() if isinstance(x, Tensor)], *tensors)
    addresses, bits = [x.data_ptr() for x in tensors], 0
    for address in addresses:
        bits |= address
    for x in tensors[: len(tensors) - made]:
        key += (x.shape, x.stride(), x.dtype)
    if bits & 15 or has_launch_hooks():
        start(*given)
        return
    kept: dict[Any, CachedLaunch | None] = _kept.of(layout)
    known = kept.get(found := tuple(key))
    if known is None:
        launch = start(*given)
        if found in kept:
            kept[found] = None if launch is None else _cached_launch(launch, layout, tensors)
        elif len(kept) < MOST_LAUNCHES:
            kept[found] = None  # cache from the second call on, because the first one may be the only one
        return
    arguments = known.arguments.copy()
    for i, of_layout in known.owned:
        arguments[i] = of_layout(layout).data_ptr()
    for i, getters in known.tables:
        arguments[i] = tuple([of_layout(layout).data_ptr() for of_layout in getters])
    for i, which in known.pointers:
        arguments[i] = addresses[which]
    for i, which, described in known.descriptors:
        arguments[i] = described(tensors[which], addresses[which])
    known.start(arguments, device)


_kept = PerLayout()


def _cached_launch(launch: Launch, layout: BlockLayout, tensors: tuple[Tensor, ...]) -> CachedLaunch | None:
    """Convert a launch to a `CachedLaunch`; None if an argument is a copy, or if two tensors are the same object."""
    owned = _tensors_of(layout)
    which = {id(x): i for i, x in enumerate(tensors)}
    if len(which) < len(tensors):
        return None
    below = direct_launcher(launch.compiled, launch.grid)
    arguments: list[Any] = []
    own, pointers, tables = [], [], []
    descriptors: list[tuple[int, int, Callable[[Tensor, int], Any]]] = []
    for x in launch.arguments:
        at = len(arguments)
        arguments.append(None)
        if isinstance(x, Tensor) and id(x) in which:
            pointers.append((at, which[id(x)]))
        elif isinstance(x, Tensor) and id(x) in owned:
            own.append((at, attrgetter(owned[id(x)])))
        elif isinstance(x, tuple) and all(id(each) in owned for each in x):
            tables.append((at, tuple(attrgetter(owned[id(each)]) for each in x)))
        elif type(x) in DESCRIPTORS and id(x.base) in which:
            if below is None:
                descriptors.append((at, which[id(x.base)], partial(_rebased, rebased(x, None))))
            else:
                descriptors.append((at, which[id(x.base)], below.described(x, len(descriptors))))
                arguments += (*x.shape, *x.strides)
        elif isinstance(x, Tensor) or type(x) in DESCRIPTORS or (isinstance(x, tuple) and isinstance(x[0], Tensor)):
            return None
        else:
            arguments[at] = x
    start = below.start if below else partial(run, launch.compiled, launch.grid)
    return CachedLaunch(start, arguments, tuple(own), tuple(tables), tuple(pointers), tuple(descriptors))


def _rebased(template: Any, x: Tensor, address: int) -> Any:
    return rebased(template, x)


def _tensors_of(layout: BlockLayout) -> dict[int, str]:
    """Map the identity of each tensor that a layout keeps alive to its attribute path."""
    parts = {"": vars(layout), "masks.": vars(layout.masks), "derived.": vars(layout.derived)}
    if layout.derived.transposed is not None:
        parts["transposed."] = vars(layout.transposed)
    every = ((part + name, x) for part, each in parts.items() for name, x in each.items())
    return {id(x): path for path, x in every if isinstance(x, Tensor)}  # equal small integers are one object
