# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks and selection of blocks: `kernels.selection.contract.SelectionKernels`."""

from dynaxx.kernels.selection.triton.entries import emit_entries
from dynaxx.kernels.selection.triton.pool import pool_blocks
from dynaxx.kernels.selection.triton.select import choose_rows

__all__ = [
    "choose_rows",
    "emit_entries",
    "pool_blocks",
]
