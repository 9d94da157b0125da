# SPDX-License-Identifier: Apache-2.0
"""Operation counts of the registered ops for `torch.utils.flop_counter.FlopCounterMode`.

They count the products in the blocks that a layout visits: two matrix products forward, five backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry, register_flop_formula


def pairs_in_blocks(q: Tensor, layout: list[Tensor], q_block: int, kv_block: int) -> int:
    """Return the pairs in all visited blocks, over batch entries and q heads; meta and fake layouts count as full."""
    indptr, indices = layout[0], layout[2]
    known = not indptr.is_meta and type(indptr) is Tensor and indptr.numel() > 0
    visited = int(indptr.flatten()[-1]) if known else indices.numel()
    copies = q.shape[0] // indptr.shape[0] * (q.shape[2] // indptr.shape[1])
    return visited * copies * q_block * kv_block


@register_flop_formula(torch.ops.dynaxx.attention_forward, get_raw=True)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], q_block: int, kv_block: int, *rest: Any, out_val: Any = None
) -> int:
    return 2 * pairs_in_blocks(q, layout, q_block, kv_block) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.dynaxx.attention_backward, get_raw=True)
def _backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: list[Tensor],
    q_block: int,
    kv_block: int,
    *rest: Any,
    out_val: Any = None,
) -> int:
    return 2 * pairs_in_blocks(q, layout, q_block, kv_block) * (3 * q.shape[3] + 2 * v.shape[3])


def teach_counters() -> None:
    """Give the formulas to counters that were made before this module was loaded."""
    ops = (torch.ops.dynaxx.attention_forward, torch.ops.dynaxx.attention_backward)
    for mode in _get_current_dispatch_mode_stack():
        known = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(known, dict):
            for op in ops:
                known.setdefault(op, flop_registry[op])
