# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout: `kernels.contract.AttentionKernels` of the hopper backend."""

from dynaxx.kernels.hopper.attention.backward import attention_backward
from dynaxx.kernels.hopper.attention.forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
