# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens on any GPU: `kernels.contract.TokenKernels`."""

from dynaxx.kernels.gpu.tokens.operators import backward, forward, latent_backward
from dynaxx.kernels.gpu.tokens.plan import prepare

__all__ = ["backward", "forward", "latent_backward", "prepare"]
