# SPDX-License-Identifier: Apache-2.0
"""What the CPU kernels serve, answered without loading the core."""

from __future__ import annotations

from dynaxx.kernels.cpu.arguments import ELEMENTS
from dynaxx.kernels.problem import AttentionProblem


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return why the core cannot serve: another device, or fp64, which it does not compute in."""
    reasons = []
    if problem.device.type != "cpu":
        reasons.append(f"tensors are on {problem.device}, not on the CPU")
    if problem.dtype not in ELEMENTS:
        reasons.append(f"computes in fp32, got {str(problem.dtype).removeprefix('torch.')}")
    return reasons
