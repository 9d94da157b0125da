# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention on any GPU: `kernels.nsa.contract.NsaKernels`, entirely from `kernels.nsa.gpu`."""

from dynaxx.kernels.nsa.gpu import compress as pooling
from dynaxx.kernels.nsa.gpu import gate as gating
from dynaxx.kernels.nsa.gpu.select import select_blocks
from dynaxx.kernels.nsa.gpu.selected import prepare_selected, schedule_of, selected_backward, selected_forward

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
