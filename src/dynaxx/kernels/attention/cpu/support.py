# SPDX-License-Identifier: Apache-2.0
"""The problems that the CPU backend serves, answered without loading the core."""

from __future__ import annotations

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.runtime.core_arguments import ELEMENTS


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return the reasons why the CPU backend cannot serve: another device, or fp64, which the core does not support."""
    reasons = []
    if problem.device.type != "cpu":
        reasons.append(f"tensors are on {problem.device}, not on the CPU")
    if problem.dtype not in ELEMENTS:
        reasons.append(f"computes in fp32, got {str(problem.dtype).removeprefix('torch.')}")
    return reasons
