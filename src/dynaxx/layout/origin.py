"""What the host knows of a layout that it made and copied to a GPU, so that nothing is read back for it.

It is kept with the layout's tensors: a compiler takes a layout apart and passes only those on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from dynaxx.layout.block_layout import BlockLayout


class Origin(NamedTuple):
    """Where a layout on a GPU comes from."""

    host: Callable[[], BlockLayout | None]  # the layout on the host
    order: Tensor | None  # `BlockLayout.kv_order`, on the GPU
    state: tuple[int, ...]  # of its tensors then: addresses, and how often they were written to


_origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by `kv_indptr`


def remember(layout: BlockLayout, host: Callable[[], BlockLayout | None], order: Tensor | None) -> None:
    """Keep what the host knows of a layout, which lies elsewhere."""
    vars(layout).update(kv_order=order, _on_host=host)
    if not torch.compiler.is_compiling():
        _origins[layout.kv_indptr] = Origin(host, order, _state(layout))


def recall(layout: BlockLayout, kv_indptr: Tensor) -> None:
    """Tell a layout what was kept of the one whose tensors it has, as long as nobody has written to them."""
    known: Origin | None = _origins.get(kv_indptr)
    if known is not None and known.state == _state(layout):
        vars(layout).update(kv_order=known.order, _on_host=known.host)


def times_written(x: Tensor) -> int:
    """Grows with each operation that writes to a tensor; 0 where torch does not count."""
    return 0 if x.is_inference() else x._version


def _state(layout: BlockLayout) -> tuple[int, ...]:
    tensors = (layout.kv_indptr, layout.kv_indices)
    return (*(x.data_ptr() for x in tensors), *(times_written(x) for x in tensors))
