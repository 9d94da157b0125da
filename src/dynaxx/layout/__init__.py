# SPDX-License-Identifier: Apache-2.0
"""`BlockLayout`, the data structure that patterns and selectors produce and kernels consume, and its conversions.

The files:

    block_layout, layout_tensors  the data structure, its constructors, and what it derives from its tensors
    fields                        its tensors and sizes alone, which the other files read
    grid, masks, entries          its parts: the grid of blocks, element masks, lists of visited blocks
    packed, pieces, hide_keys     layouts of packed and padded batches
    dense, block_mask, plot       conversions and drawing
    on_gpu                        layouts that kernels make on a GPU
    paging/                       caches of keys and values in pages
    validate, form, derived, cache, host, host_metadata  checks, caches and host copies
"""

from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.block_mask import from_block_mask, to_block_mask
from dynaxx.layout.derived import TransposedLayout
from dynaxx.layout.grid import BLOCK_SIZES, BlockGrid, as_block_size
from dynaxx.layout.masks import EMPTY, FULL, ElementMasks
from dynaxx.layout.packed import CuSeqlens, PackedLayout, pack_layouts

__all__ = [
    "BLOCK_SIZES",
    "EMPTY",
    "FULL",
    "BlockGrid",
    "BlockLayout",
    "CuSeqlens",
    "ElementMasks",
    "PackedLayout",
    "TransposedLayout",
    "as_block_size",
    "from_block_mask",
    "pack_layouts",
    "to_block_mask",
]
