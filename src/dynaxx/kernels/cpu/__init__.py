"""The CPU backend: a C++ core, compiled with the package or at first use; gathers in torch where there is none."""

from __future__ import annotations

from dynaxx.core.library import CpuStatus, cpu_status
from dynaxx.kernels.cpu.arguments import ELEMENTS
from dynaxx.kernels.cpu.backward import attention_backward
from dynaxx.kernels.cpu.forward import attention_forward
from dynaxx.kernels.problem import AttentionProblem

__all__ = ["CpuStatus", "attention_backward", "attention_forward", "cpu_status", "unsupported_reasons"]


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Another device, or fp64, which the core does not compute in."""
    reasons = []
    if problem.device.type != "cpu":
        reasons.append(f"tensors are on {problem.device}, not on the CPU")
    if problem.dtype not in ELEMENTS:
        reasons.append(f"computes in fp32, got {str(problem.dtype).removeprefix('torch.')}")
    return reasons
