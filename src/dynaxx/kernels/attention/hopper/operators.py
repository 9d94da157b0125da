# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout: the hopper backend's `kernels.attention.contract.AttentionKernels`."""

from dynaxx.kernels.attention.hopper.backward import attention_backward
from dynaxx.kernels.attention.hopper.forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
