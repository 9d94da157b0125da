# SPDX-License-Identifier: Apache-2.0
"""Sum and differentiate the branches of Native Sparse Attention together: `kernels.contract.FusedBranches`."""

from dynaxx.kernels.gpu.nsa.selected import Mixture, selected_and_mixed
from dynaxx.kernels.hopper.nsa.backward import mixed_backward
from dynaxx.kernels.hopper.nsa.rows import Branches, branch_rows

__all__ = ["Branches", "Mixture", "branch_rows", "mixed_backward", "selected_and_mixed"]
