# SPDX-License-Identifier: Apache-2.0
"""Refuse models that compute NaN or infinity, before anything is measured on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def check_weights(model: Any, name: str) -> None:
    """Raise ValueError if a parameter or buffer has NaN or infinity. The message names it and the model `name`."""
    for key, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_floating_point() and weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
            raise ValueError(f"{name} has NaN or infinity in {key}; its weights are broken, load another copy")


def check_finite(x: Tensor, what: str) -> None:
    """Raise ValueError if the activations `what` are not finite, usually because their dtype is too narrow."""
    if not x.isfinite().all():
        dtype = str(x.dtype).removeprefix("torch.")
        fix = "try --dtype bfloat16 or float32" if x.dtype is torch.float16 else "check its weights and its config"
        raise ValueError(f"{what} are not finite in {dtype}; {fix}")
