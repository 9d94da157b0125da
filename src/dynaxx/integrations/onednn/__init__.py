# SPDX-License-Identifier: Apache-2.0
"""Run the matrix products of a torch model on oneDNN where torch would use a slower library."""

from dynaxx.integrations.onednn.linears import OneDnnHandle, OneDnnLinear, use_onednn

__all__ = ["OneDnnHandle", "OneDnnLinear", "use_onednn"]
