# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention on any GPU: `kernels.nsa.contract.NsaKernels`, entirely from `kernels.nsa.gpu`."""

from dynaxx.trained.nsa.kernels.gpu import compress as pooling
from dynaxx.trained.nsa.kernels.gpu import gate as gating
from dynaxx.trained.nsa.kernels.gpu.select import select_blocks
from dynaxx.trained.nsa.kernels.gpu.selected import prepare_selected, schedule_of, selected_backward, selected_forward

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
