# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations for torch's `FlopCounterMode`: products of queries, keys and values in visited blocks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dynaxx.layout.paging import PagedCache
from dynaxx.selection.pages import PageBudget, pages_touched


@torch.library.custom_op("dynaxx::counted_flops", mutates_args=())  # a copy of the package may be loaded again
def counted_flops(flops: int) -> None:
    """Do nothing, so that a `FlopCounterMode` can count the call."""


def _pairs_in_blocks(q: Tensor, layout: list[Tensor], q_block: int, kv_block: int) -> int:
    """Return the pairs in all visited blocks, over batch entries and q heads; meta and fake layouts count as full.

    Patterns, whose layouts are built when a compiled graph runs, are not counted.
    """
    if not layout:
        return 0
    indptr, indices = layout[0], layout[2]
    known = not indptr.is_meta and type(indptr) is Tensor and indptr.numel() > 0
    visited = int(indptr.flatten()[-1]) if known else indices.numel()
    copies = q.shape[0] // indptr.shape[0] * (q.shape[2] // indptr.shape[1])
    return visited * copies * q_block * kv_block


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], q_block: int, kv_block: int, *rest: Any, **out: Any
) -> int:
    """Count the two products of the forward pass in the blocks that a layout visits."""
    return 2 * _pairs_in_blocks(q, layout, q_block, kv_block) * (q.shape[3] + v.shape[3])


def _backward_flops(*inputs: Any, **out: Any) -> int:
    """Count the five products of the backward pass."""
    q, _, v, _, _, layout, q_block, kv_block = inputs[2:10]
    return 2 * _pairs_in_blocks(q, layout, q_block, kv_block) * (3 * q.shape[3] + 2 * v.shape[3])


def is_counting() -> bool:
    """Return whether a `FlopCounterMode` is active, and let it count the ops.

    Its module takes long to load, so it is left to who uses it.
    """
    if "torch.utils.flop_counter" not in sys.modules or not torch._C._len_torch_dispatch_stack():
        return False
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    formulas: dict[Any, Any] = {
        torch.ops.dynaxx.attention_forward: _forward_flops,
        torch.ops.dynaxx.attention_backward: _backward_flops,
        torch.ops.dynaxx.counted_flops: lambda flops, **out: flops,
    }
    counters = [getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()]
    registries = [getattr(counter, "flop_registry", None) for counter in counters]
    for op, formula in formulas.items():
        if op not in flop_registry:
            register_flop_formula(op, get_raw=True)(formula)
        for known in registries:
            if isinstance(known, dict):  # a counter that was made before the formulas were registered
                known.setdefault(op, flop_registry[op])
    return any(isinstance(known, dict) for known in registries)


def count(flops: int) -> None:
    """Count the operations of a kernel that is no op of `torch.library`; call it only if `is_counting`."""
    if flops:
        counted_flops(flops)


def decode_flops(q: Tensor, cache: PagedCache, pages: Tensor | PageBudget | None, left: int | None) -> int:
    """Return the operations of a decode step on the keys or whole pages that it reads, and of scoring pages."""
    steps, heads, group = q.shape[1], q.shape[2], q.shape[2] // cache.kv_heads
    width, used = 2 * (cache.head_dim + cache.head_dim_v), cache.seqused_k.long()
    if isinstance(pages, Tensor):
        return width * int((pages >= 0).sum()) * cache.page_size * group * steps
    if isinstance(pages, PageBudget) and not pages.reads_everything:
        filled = (used + cache.page_size - 1)[:, None] // cache.page_size
        number, share = pages.wanted(cache.kv_heads, cache.device)
        forced = pages_touched(pages.sinks, cache.page_size) + pages_touched(pages.window, cache.page_size)
        read = (number + (share * filled).ceil() + forced).minimum(filled).sum()
        return width * int(read) * cache.page_size * group * steps + 2 * int(filled.sum()) * cache.head_dim * heads
    first = 0 if cache.leftpad_k is None else cache.leftpad_k.long()[:, None]
    seen = used[:, None] - torch.arange(steps, device=cache.device) - first
    return width * int(seen.clamp(0, left + 1 if left is not None else None).sum()) * heads
