# SPDX-License-Identifier: Apache-2.0
"""`BlockLayout`, the data structure that patterns and selectors produce and kernels consume, and its conversions."""

from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.block_mask import from_block_mask, to_block_mask
from dynaxx.layout.grid import BLOCK_SIZES, BlockGrid, as_block_size, as_integer
from dynaxx.layout.masks import EMPTY, FULL, ElementMasks
from dynaxx.layout.packed import CuSeqlens, PackedLayout, pack_layouts
from dynaxx.layout.transpose import TransposedLayout

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
    "as_integer",
    "from_block_mask",
    "pack_layouts",
    "to_block_mask",
]
