# SPDX-License-Identifier: Apache-2.0
"""The matrix products of a torch model on oneDNN, where torch would take a slower library for them."""

from dynaxx.integrations.onednn.linears import OneDnnHandle, OneDnnLinear, use_onednn

__all__ = ["OneDnnHandle", "OneDnnLinear", "use_onednn"]
