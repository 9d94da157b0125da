# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens on any GPU: `kernels.tokens.contract.TokenKernels`."""

from dynaxx.trained.tokens.kernels.gpu.operators import backward, forward, latent_backward
from dynaxx.trained.tokens.kernels.gpu.plan import prepare

__all__ = ["backward", "forward", "latent_backward", "prepare"]
