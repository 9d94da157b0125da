# SPDX-License-Identifier: Apache-2.0
"""`Shared`: what the replaced attention modules of one encoder share."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

GlobalKeys = Literal["fused", "merged"]
Made = TypeVar("Made")


class Shared:
    """State that the replaced modules of one model share: options, counts, and results cached during a pass.

    Attributes:
        global_keys: see `apply_to_encoder`.
        sparse: number of calls that dynaxx served.
        dense: number of other calls, by reason.
    """

    def __init__(self, global_keys: GlobalKeys | None, configs: list[Any]) -> None:
        self.global_keys = global_keys
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
