"""The CPU backend: a C++ core, compiled with the package or at first use; gathers in torch where there is none."""

from __future__ import annotations

import torch

from dynaxx.kernels.cpu.backward import attention_backward
from dynaxx.kernels.cpu.forward import attention_forward
from dynaxx.kernels.cpu.library import CpuStatus, cpu_status
from dynaxx.kernels.problem import AttentionProblem

__all__ = ["CpuStatus", "attention_backward", "attention_forward", "cpu_status", "unsupported_reasons"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Another device, or fp64, which the core does not compute in."""
    reasons = []
    if problem.device.type != "cpu":
        reasons.append(f"tensors are on {problem.device}, not on the CPU")
    if problem.dtype not in DTYPES:
        reasons.append(f"computes in fp32, got {str(problem.dtype).removeprefix('torch.')}")
    return reasons
