# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: attention computes in the dtype of `torch.autocast`, as `scaled_dot_product_attention` does."""

from __future__ import annotations

import torch
from torch import Tensor


def follow_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in the dtype of the autocast that is on for their device; unchanged without one, or in fp64.

    Inputs that are no tensors are returned as they are: the checks that follow name them.
    """
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        return q, k, v
    kind = q.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
