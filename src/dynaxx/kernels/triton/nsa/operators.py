# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention on any GPU: `kernels.contract.NsaKernels`, entirely from `kernels.gpu.nsa`."""

from dynaxx.kernels.gpu.nsa import compress as pooling
from dynaxx.kernels.gpu.nsa import gate as gating
from dynaxx.kernels.gpu.nsa.select import select_blocks
from dynaxx.kernels.gpu.nsa.selected import prepare_selected, schedule_of, selected_backward, selected_forward

fused = None  # branches are computed, and differentiated, one by one

__all__ = [
    "fused",
    "gating",
    "pooling",
    "prepare_selected",
    "schedule_of",
    "select_blocks",
    "selected_backward",
    "selected_forward",
]
