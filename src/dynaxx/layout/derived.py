# SPDX-License-Identifier: Apache-2.0
"""`DerivedValues`: values computed from a layout and cached with it, dropped when its tensors are written to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

MAX_FORMS = 1024  # layout forms for which `PerLayout` keeps a dict


class Unset:
    """Type of `UNSET`, which marks a value that is not computed yet if None is a valid value."""


UNSET = Unset()


@dataclass(frozen=True, eq=False)
class TransposedLayout:
    """The q blocks that visit each kv block: partial blocks first, then full blocks, indices ascending in each part."""

    q_indptr: Tensor  # (layout_batch, layout_heads, kv_blocks + 1) int32, absolute offsets into `q_indices`
    q_num_partial: Tensor  # (layout_batch, layout_heads, kv_blocks) int32
    q_indices: Tensor  # (nnz,) int32; on a GPU (capacity,), entries past the last row are ignored
    q_masks: Tensor  # shape like `q_indices`, values like `BlockLayout.kv_masks`

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four tensors."""
        return self.q_indptr, self.q_num_partial, self.q_indices, self.q_masks


@dataclass(eq=False)
class DerivedValues:
    """Values derived only from the tensors of one layout.

    They stay valid until the tensors are written to. `is_stale` reports writes that torch counts. It does not notice
    writes through numpy or writes to inference tensors, because torch does not count them.
    """

    nnz: int | None = None
    kv_num_blocks: Tensor | None = None
    kv_order: Tensor | Unset | None = UNSET
    column_counts: Tensor | None = None
    reach: int | None = None
    transposed: TransposedLayout | None = None
    validated: bool = False
    refused: Tensor | None = None  # per row, number of indices that a GPU left out: out of range, or named before
    placed: tuple[Tensor, Tensor] | None = None  # places of blocks, and `kv_indices` looked up in them
    form: Hashable | None = None  # see `BlockLayout.form`
    make_host: Callable[[], Any] | None = None  # computes `host` at first access
    larger: Any = None  # the layout of the same pairs in blocks of 128, or the function that makes it; None: none
    host: Any = UNSET  # the host `BlockLayout` that this layout was copied from, or None
    by_owner: dict[object, dict[Any, Any]] = field(default_factory=dict)  # one dict per `PerLayout` instance
    watched: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Start watching `tensors` for writes: their current contents are the source of the derived values."""
        if torch.compiler.is_compiling():
            return
        self.watched = tuple(x for x in tensors if not x.is_inference())
        self.versions = self.versions_now()

    def versions_now(self) -> tuple[int, ...]:
        """Return torch's write counter of each watched tensor."""
        return tuple([x._version for x in self.watched])

    def is_stale(self) -> bool:
        """Return whether a watched tensor was written to since `watch`."""
        return self.versions_now() != self.versions

    def clear(self) -> None:
        """Drop all values and watch the tensors from now on."""
        fresh = DerivedValues()
        fresh.watch(self.watched)
        vars(self).update(vars(fresh))


class HasDerived(Protocol):
    """A layout."""

    @property
    def derived(self) -> DerivedValues:
        """Return the values that are cached with it."""


class PerLayout:
    """A dict per layout, in which another room caches values that it computes from the layout.

    GPU layouts with the same `form` share one dict, unless the values depend on the contents of tensors.

    Args:
        by_form: whether layouts of the same form share their values.
    """

    def __init__(self, *, by_form: bool = True) -> None:
        self._shares = by_form
        self._by_form: dict[Hashable, dict[Any, Any]] = {}

    def of(self, layout: HasDerived) -> dict[Any, Any]:
        """Return the dict of a layout, initially empty.

        The dict lives as long as the layout, and is dropped with the other derived values after a write to a tensor.
        """
        form = layout.derived.form if self._shares else None
        if form is None:
            kept = layout.derived.by_owner.get(self)
            return layout.derived.by_owner.setdefault(self, {}) if kept is None else kept
        kept = self._by_form.get(form)
        if kept is not None:
            return kept
        if len(self._by_form) >= MAX_FORMS:
            self._by_form.clear()
        return self._by_form.setdefault(form, {})


def times_written(x: Tensor) -> int:
    """Return torch's write counter of a tensor; 0 for inference tensors, whose writes torch does not count."""
    return 0 if x.is_inference() else x._version
