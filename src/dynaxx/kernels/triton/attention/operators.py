# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout: the triton backend's `kernels.contract.AttentionKernels`."""

from dynaxx.kernels.triton.attention.backward import attention_backward
from dynaxx.kernels.triton.attention.forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
