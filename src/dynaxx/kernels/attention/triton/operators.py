# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout: the triton backend's `kernels.attention.contract.AttentionKernels`."""

from dynaxx.kernels.attention.triton.backward import attention_backward
from dynaxx.kernels.attention.triton.forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
