# SPDX-License-Identifier: Apache-2.0
"""`form_of`: what checks and launches ask of tensors beside their numbers, as one object that is quick to look up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

MOST_FORMS = 4096  # remembered; a cache that grows has another at every step


class Form:
    """Shapes, strides, dtypes and devices of some tensors, and settings; one object as long as it is remembered."""

    __slots__ = ("checked",)

    def __init__(self) -> None:
        self.checked = False  # whether tensors of it were found to fit together


def form_of(tensors: Sequence[Tensor | None], *settings: Hashable) -> Form:
    """Return the form of these tensors; settings of one type each, since equal numbers of two types are one key."""
    key = (*settings, *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])
    found = _known.get(key)
    if found is None:
        if len(_known) >= MOST_FORMS:
            _known.clear()
        found = _known[key] = Form()
    return found


_known: dict[Hashable, Form] = {}
