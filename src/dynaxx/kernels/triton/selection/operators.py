# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks and selection of blocks: `kernels.contract.SelectionKernels`."""

from dynaxx.kernels.triton.selection.entries import emit_entries
from dynaxx.kernels.triton.selection.hash_counts import hash_counts
from dynaxx.kernels.triton.selection.int8_scores import int8_scores, quantised_keys
from dynaxx.kernels.triton.selection.pool import pool_blocks
from dynaxx.kernels.triton.selection.probe_lines import line_scores, probe_lines
from dynaxx.kernels.triton.selection.select import choose_rows
from dynaxx.kernels.triton.selection.tile_mass import tile_mass

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
