# SPDX-License-Identifier: Apache-2.0
"""Fused branches of native sparse attention, forward and backward: `kernels.nsa.contract.FusedBranches`."""

from dynaxx.trained.nsa.kernels.gpu.selected import Mixture, selected_and_mixed
from dynaxx.trained.nsa.kernels.hopper.backward import mixed_backward
from dynaxx.trained.nsa.kernels.hopper.rows import Branches, branch_rows

__all__ = ["Branches", "Mixture", "branch_rows", "mixed_backward", "selected_and_mixed"]
