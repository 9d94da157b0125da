# SPDX-License-Identifier: Apache-2.0
"""Host-side metadata of GPU layouts, so that launches never synchronize and nothing is computed twice.

The metadata is stored with the layout, and also keyed by its `kv_indptr`, because a compiler splits a layout into
tensors and passes on only those.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dynaxx.layout.derived import times_written
from dynaxx.layout.fields import LayoutFields

L = TypeVar("L", bound=LayoutFields)


class HostMetadata(NamedTuple):
    """The host-side source of a GPU layout."""

    make_host: Callable[[], Any]  # returns the host layout
    order: Tensor | None  # `BlockLayout.kv_order`, on the GPU
    state: tuple[int, ...]  # addresses and write counters of the layout's tensors when this was recorded


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # keyed by `kv_indptr`


def attach(layout: LayoutFields, make_host: Callable[[], Any], order: Tensor | None) -> None:
    """Store the host-side metadata of a GPU layout."""
    layout.derived.kv_order, layout.derived.make_host = order, make_host
    if not torch.compiler.is_compiling():
        _known[layout.kv_indptr] = HostMetadata(make_host, order, _state(layout))


def restore(layout: LayoutFields, kv_indptr: Tensor) -> None:
    """Give a layout the metadata stored for `kv_indptr`, unless the tensors were written to since."""
    known: HostMetadata | None = _known.get(kv_indptr)
    if known is not None and known.state == _state(layout):
        layout.derived.kv_order, layout.derived.make_host = known.order, known.make_host


def set_form(layout: L, form: Hashable) -> L:
    """Set `BlockLayout.form`, mark the rows as unsorted, and return the layout."""
    layout.derived.form, layout.derived.kv_order = form, None
    return layout


def _state(layout: LayoutFields) -> tuple[int, ...]:
    tensors = (layout.kv_indptr, layout.kv_indices)
    return (*(x.data_ptr() for x in tensors), *(times_written(x) for x in tensors))
