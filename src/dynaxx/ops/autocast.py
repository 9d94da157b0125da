# SPDX-License-Identifier: Apache-2.0
"""`follow_autocast`: cast attention inputs to the dtype of `torch.autocast`, as in `scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.layout.host import AUTOCAST_DEVICES


def follow_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to the autocast dtype of their device; unchanged if autocast is off or the dtype is fp64.

    Arguments that are not tensors are returned unchanged, so that later checks can name them.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return q, k, v
    kind = q.device.type
    if kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
