# SPDX-License-Identifier: Apache-2.0
"""Layouts made on a GPU in a few launches, without the host: rows from block indices, and columns from rows."""

from dynaxx.kernels.layout.columns import columns_of
from dynaxx.kernels.layout.rows import MAX_COLUMNS, index_inputs, rows_of_indices

__all__ = ["MAX_COLUMNS", "columns_of", "index_inputs", "rows_of_indices"]
