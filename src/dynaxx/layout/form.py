# SPDX-License-Identifier: Apache-2.0
"""`Form`: shapes, strides, dtypes and devices of several tensors as one object, so that checks run once per form."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

MAX_FORMS = 4096  # cached forms; a growing cache has a new form at every step


class Form:
    """Shapes, strides, dtypes and devices of tensors, plus settings. Equal forms are one object while cached."""

    __slots__ = ("checked", "prepared")

    def __init__(self) -> None:
        self.checked = False  # whether tensors of this form passed their checks
        self.prepared: Any = None  # what calls of this form repeat


def form_of(tensors: Sequence[Tensor | None], *settings: Hashable) -> Form:
    """Return the form of these tensors and settings.

    Each setting must always have the same type, because equal numbers of different types are the same dict key.
    """
    key = (*settings, *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])
    found = _known.get(key)
    if found is None:
        if len(_known) >= MAX_FORMS:
            _known.clear()
        found = _known[key] = Form()
    return found


_known: dict[Hashable, Form] = {}
