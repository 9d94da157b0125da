# SPDX-License-Identifier: Apache-2.0
"""Host-side metadata of GPU layouts, so that launches never synchronise and nothing is computed twice.

It is kept with the layout, and by the layout's `kv_indptr`: a compiler takes a layout apart and passes on its tensors
only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dynaxx.layout.derived import times_written

if TYPE_CHECKING:
    from dynaxx.layout.block_layout import BlockLayout


class HostMetadata(NamedTuple):
    """Where a layout on a GPU was copied from."""

    make_host: Callable[[], BlockLayout | None]  # returns the layout on the host
    order: Tensor | None  # `BlockLayout.kv_order`, on the GPU
    state: tuple[int, ...]  # of its tensors then: addresses, and how often they were written to


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by `kv_indptr`


def attach(layout: BlockLayout, make_host: Callable[[], BlockLayout | None], order: Tensor | None) -> None:
    """Keep the host-side metadata of a layout that lies on a GPU."""
    layout.derived.kv_order, layout.derived.make_host = order, make_host
    if not torch.compiler.is_compiling():
        _known[layout.kv_indptr] = HostMetadata(make_host, order, _state(layout))


def restore(layout: BlockLayout, kv_indptr: Tensor) -> None:
    """Give a layout the metadata of the one that had the same tensors, unless they were written to since."""
    known: HostMetadata | None = _known.get(kv_indptr)
    if known is not None and known.state == _state(layout):
        layout.derived.kv_order, layout.derived.make_host = known.order, known.make_host


def set_form(layout: BlockLayout, form: Hashable) -> BlockLayout:
    """Give a layout a `BlockLayout.form` and its rows no other order than their own; return it."""
    layout.derived.form, layout.derived.kv_order = form, None
    return layout


def _state(layout: BlockLayout) -> tuple[int, ...]:
    tensors = (layout.kv_indptr, layout.kv_indices)
    return (*(x.data_ptr() for x in tensors), *(times_written(x) for x in tensors))
