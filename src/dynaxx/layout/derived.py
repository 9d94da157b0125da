# SPDX-License-Identifier: Apache-2.0
"""Values computed from a layout and kept with it, and when they must be dropped."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dynaxx.layout.block_layout import BlockLayout
    from dynaxx.layout.transpose import TransposedLayout

MOST_FORMS = 1024  # of which anything is kept


class Unset:
    """Marks a value that was not computed yet, where None is one."""


UNSET = Unset()


@dataclass(eq=False)
class DerivedValues:
    """Values derived from the tensors of one layout, and from nothing else.

    They hold as long as nobody writes to the tensors. `is_stale` says whether torch has counted such a write; writes
    that it does not count (through numpy, or to inference tensors) are not seen.
    """

    nnz: int | None = None
    kv_num_blocks: Tensor | None = None
    kv_order: Tensor | Unset | None = UNSET
    column_counts: Tensor | None = None
    transposed: TransposedLayout | None = None
    validated: bool = False
    form: Hashable | None = None  # see `BlockLayout.form`
    make_host: Callable[[], BlockLayout | None] | None = None  # makes `host`
    host: BlockLayout | Unset | None = UNSET  # the layout on the host that this one was copied from
    by_owner: dict[object, dict[Any, Any]] = field(default_factory=dict)  # see `PerLayout`
    watched: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Take these tensors as they are now for what the values are derived from."""
        if torch.compiler.is_compiling():
            return
        self.watched = tuple(x for x in tensors if not x.is_inference())
        self.versions = self.versions_now()

    def versions_now(self) -> tuple[int, ...]:
        """Return how often each watched tensor has been written to."""
        return tuple([x._version for x in self.watched])

    def is_stale(self) -> bool:
        """Whether a tensor was written to since."""
        return self.versions_now() != self.versions

    def clear(self) -> None:
        """Drop every value, and take the tensors as they are now."""
        fresh = DerivedValues()
        fresh.watch(self.watched)
        vars(self).update(vars(fresh))


class PerLayout:
    """One dict for each layout, for values that another room computes from it. Layouts of one form share theirs."""

    def __init__(self) -> None:
        self._by_form: dict[Hashable, dict[Any, Any]] = {}

    def of(self, layout: BlockLayout) -> dict[Any, Any]:
        """Return the dict of a layout, empty at first. It lives as long as the layout does, and is dropped with its
        other derived values when a tensor was written to."""
        form = layout.derived.form
        if form is None:
            kept = layout.derived.by_owner.get(self)
            return layout.derived.by_owner.setdefault(self, {}) if kept is None else kept
        kept = self._by_form.get(form)
        if kept is not None:
            return kept
        if len(self._by_form) >= MOST_FORMS:
            self._by_form.clear()
        return self._by_form.setdefault(form, {})


def times_written(x: Tensor) -> int:
    """Return a number that grows with each operation that writes to a tensor; 0 where torch does not count."""
    return 0 if x.is_inference() else x._version
