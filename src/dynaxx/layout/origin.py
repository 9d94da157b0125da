"""What the host knows of a layout on a GPU, so that nothing is read back for it, or computed twice.

Of one that it made and copied there, it is kept with the layout's tensors: a compiler takes a layout apart and passes
only those on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from dynaxx.layout.block_layout import BlockLayout


MOST_FORMS = 1024  # of which anything is kept


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


def chosen_alike(layout: BlockLayout, form: Hashable) -> BlockLayout:
    """Say that a layout has a `BlockLayout.form`, and no order of rows but their own; return it."""
    vars(layout).update(_form=form, kv_order=None)
    return layout


class KeptWithLayouts:
    """What is computed from layouts: a dict for all of one form, or for each one that has none, as long as it lives."""

    def __init__(self) -> None:
        self._of_one: WeakKeyDictionary[BlockLayout, dict[Any, Any]] = WeakKeyDictionary()
        self._of_form: dict[Hashable, dict[Any, Any]] = {}

    def of(self, layout: BlockLayout) -> dict[Any, Any]:
        """The dict of a layout, empty at first."""
        form = layout.form
        kept = self._of_one.get(layout) if form is None else self._of_form.get(form)
        if kept is not None:
            return kept
        if form is None:
            return self._of_one.setdefault(layout, {})
        if len(self._of_form) >= MOST_FORMS:
            self._of_form.clear()
        return self._of_form.setdefault(form, {})


def times_written(x: Tensor) -> int:
    """Grows with each operation that writes to a tensor; 0 where torch does not count."""
    return 0 if x.is_inference() else x._version


def _state(layout: BlockLayout) -> tuple[int, ...]:
    tensors = (layout.kv_indptr, layout.kv_indices)
    return (*(x.data_ptr() for x in tensors), *(times_written(x) for x in tensors))
