# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks and selection of blocks: `kernels.selection.contract.SelectionKernels`."""

from dynaxx.kernels.selection.triton.entries import emit_entries
from dynaxx.kernels.selection.triton.hash_counts import hash_counts
from dynaxx.kernels.selection.triton.int8_scores import int8_scores, quantised_keys
from dynaxx.kernels.selection.triton.pool import pool_blocks
from dynaxx.kernels.selection.triton.probe_lines import line_scores, probe_lines
from dynaxx.kernels.selection.triton.select import choose_rows
from dynaxx.kernels.selection.triton.tile_mass import tile_mass

__all__ = [
    "choose_rows",
    "emit_entries",
    "hash_counts",
    "int8_scores",
    "line_scores",
    "pool_blocks",
    "probe_lines",
    "quantised_keys",
    "tile_mass",
]
