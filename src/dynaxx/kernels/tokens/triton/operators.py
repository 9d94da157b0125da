# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens on any GPU: `kernels.tokens.contract.TokenKernels`."""

from dynaxx.kernels.tokens.gpu.operators import backward, forward, latent_backward
from dynaxx.kernels.tokens.gpu.plan import prepare

__all__ = ["backward", "forward", "latent_backward", "prepare"]
