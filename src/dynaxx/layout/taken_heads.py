# SPDX-License-Identifier: Apache-2.0
"""The layout of heads that read the blocks of another layout's heads, some of them several times."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout.layout_tensors import LayoutTensors


class TakenRows(NamedTuple):
    """The tensors of `BlockLayout` that differ between heads."""

    kv_indptr: Tensor
    kv_num_partial: Tensor
    kv_indices: Tensor
    kv_masks: Tensor


def taken_rows(layout: LayoutTensors, heads: tuple[int, ...], capacity: int | None) -> TakenRows:
    """Return the rows of the given heads of a layout, in their order; a head may occur several times.

    Args:
        layout: a layout with heads of its own.
        heads: head of the layout for each new head.
        capacity: slots of the new layout, at least as many as its blocks. None counts them, which waits for a GPU.
    """
    which = _on_device(heads, layout.device)
    counts, num_partial = layout.kv_num_blocks[:, which], layout.kv_num_partial[:, which]
    batch, new_heads, rows = counts.shape
    ends = counts.flatten().cumsum(0)
    flat = torch.nn.functional.pad(ends, (1, 0)).int()
    indptr = flat.unfold(0, rows + 1, rows).reshape(batch, new_heads, rows + 1)
    starts = layout.kv_indptr[:, which, :-1].flatten()
    if capacity is None:
        row = torch.repeat_interleave(counts.flatten().long())
        slot = torch.arange(row.numel(), device=layout.device)
    else:  # slots past the last block are ignored
        slot = torch.arange(capacity if layout.kv_indices.numel() else 0, device=layout.device)
        row = torch.searchsorted(ends, slot, right=True).clamp_(max=max(0, ends.numel() - 1))
    source = (slot + (starts - flat[:-1])[row]).clamp_(max=max(0, layout.kv_indices.numel() - 1))
    return TakenRows(indptr, num_partial, layout.kv_indices[source], layout.kv_masks[source])


@lru_cache(maxsize=256)
def _on_device(heads: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(heads, device=device, dtype=torch.int64)
