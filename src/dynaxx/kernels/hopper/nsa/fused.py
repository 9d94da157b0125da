# SPDX-License-Identifier: Apache-2.0
"""Fused branches of native sparse attention, forward and backward: `kernels.contract.FusedBranches`."""

from dynaxx.kernels.gpu.nsa.selected import Mixture, selected_and_mixed
from dynaxx.kernels.hopper.nsa.backward import mixed_backward
from dynaxx.kernels.hopper.nsa.rows import Branches, branch_rows

__all__ = ["Branches", "Mixture", "branch_rows", "mixed_backward", "selected_and_mixed"]
