# SPDX-License-Identifier: Apache-2.0
"""Layouts that kernels make on a GPU, in a few launches and without the host.

The kernels lie in a later room and need Triton, so they are loaded by name at first use, as backends are.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.layout.derived import TransposedLayout
from dynaxx.layout.fields import LayoutFields
from dynaxx.layout.form import Form, form_of
from dynaxx.layout.grid import BlockGrid
from dynaxx.layout.host import moved_together
from dynaxx.layout.masks import ElementMasks, causal_masks

CHECK_INDICES = "DYNAXX_CHECK_INDICES"  # environment variable: 1 reads back whether every index was accepted


@cache
def _kernels() -> Any:
    """Return `kernels.layout`, or None without Triton."""
    try:
        return importlib.import_module("..kernels.layout", __package__)
    except ImportError:
        return None


def _serves(x: Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling() and _kernels() is not None


class RowsOnGpu(NamedTuple):
    """Parts of the layout that `BlockLayout.from_block_indices` makes of indices on a GPU."""

    grid: BlockGrid
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]  # kv_indptr, kv_num_partial, kv_indices, kv_masks
    refused: Tensor  # (batch, heads, q_blocks) int32: number of indices that were left out
    masks: ElementMasks
    form: Form
    is_checked: bool  # whether `CHECK_INDICES` asks to read `refused` back


def rows_on_gpu(block_indices: Tensor, make_grid: Callable[[], BlockGrid], *sizes: Hashable) -> RowsOnGpu | None:
    """Return the rows of indices, see `BlockLayout.from_block_indices`; None where torch makes them.

    Args:
        block_indices: the indices.
        make_grid: function that checks the arguments and returns the grid; called once for all calls of equal form.
        sizes: all other arguments of the call.
    """
    if not isinstance(block_indices, Tensor) or not _serves(block_indices):
        return None
    form = form_of((block_indices,), "block indices", *sizes, *map(type, sizes))
    inputs = form.prepared
    if inputs is None:
        grid = make_grid()
        if not block_indices.numel() or grid.kv_blocks > _kernels().MAX_COLUMNS:
            return None
        masks = _causal_masks_on(block_indices.device, grid)
        inputs = form.prepared = _kernels().index_inputs(block_indices, grid, masks, form)
    *tensors, refused = _kernels().rows_of_indices(block_indices, inputs)
    is_checked = os.environ.get(CHECK_INDICES, "0") not in ("", "0")
    return RowsOnGpu(inputs.grid, tuple(tensors), refused, inputs.masks, form, is_checked)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # layouts for training share the masks
def _causal_masks_on(device: torch.device, grid: BlockGrid) -> ElementMasks:
    masks = causal_masks(grid)
    bits, bands = moved_together([masks.bits, masks.bands], device)
    return ElementMasks(bits, bands, masks.kv_block)


def transposed_on_gpu(layout: LayoutFields) -> TransposedLayout | None:
    """Return the columns of a layout, see `transpose`; None where torch sorts them."""
    found: TransposedLayout | None = _kernels().columns_of(layout) if _serves(layout.kv_indptr) else None
    return found
