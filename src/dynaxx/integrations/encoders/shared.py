# SPDX-License-Identifier: Apache-2.0
"""`Replaced`, the base of the replaced attention modules of an encoder, and `Shared`, what those of one model share."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

Made = TypeVar("Made")


class Shared:
    """State that the replaced modules of one model share: counts, and results cached during a pass.

    Attributes:
        sparse: number of calls that dynaxx served.
        dense: number of other calls, by reason.
    """

    def __init__(self, configs: list[Any]) -> None:
        self.sparse = 0
        self.dense: Counter[str] = Counter()
        self._configs = configs
        self._pass: tuple[weakref.ref[Tensor], int, dict[Hashable, Any]] | None = None

    @property
    def wants_attentions(self) -> bool:
        """Return whether a config requests the attention weights, which fused kernels do not compute."""
        return any(getattr(config, "output_attentions", False) for config in self._configs)

    def once_per_mask(self, mask: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, cached per mask: all layers of a forward pass get the same mask tensor."""
        version = 0 if mask.is_inference() else mask._version
        known = self._pass
        if known is None or known[0]() is not mask or known[1] != version:
            known = self._pass = (weakref.ref(mask), version, {})  # hold the mask weakly, since it may be large
        if key not in known[2]:
            with torch.inference_mode(False), torch.no_grad():  # training may use the layout later
                known[2][key] = make()
        found: Made = known[2][key]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles of a model, without cached results."""
        return {**self.__dict__, "_pass": None}


class Replaced:
    """The base of replaced modules. Copies and pickles of one are of the original's class, without dynaxx.

    Attributes:
        dynaxx: what the replaced modules of a model share.
        dynaxx_original: the replaced module, with the same parameters, children and hooks.
    """

    dynaxx: Shared
    dynaxx_original: nn.Module

    @classmethod
    def sharing(cls, original: nn.Module, shared: Shared) -> Self:
        """Return a module that shares the parameters, children and hooks of the original."""
        ours = cls.__new__(cls)
        ours.__dict__.update(original.__dict__, dynaxx=shared, dynaxx_original=original)
        return ours

    def restored(self) -> nn.Module:
        """Return the original module, with the attributes that were set meanwhile."""
        self.dynaxx_original.__dict__.update(self._plain())
        return self.dynaxx_original

    def _plain(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if not name.startswith("dynaxx")}

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Copy and pickle as the original."""
        return object.__new__, (type(self.dynaxx_original),), self._plain()
