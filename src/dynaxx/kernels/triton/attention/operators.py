# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout: `kernels.contract.AttentionKernels` of the triton backend."""

from dynaxx.kernels.triton.attention.backward import attention_backward
from dynaxx.kernels.triton.attention.forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
