"""What the Hopper kernels serve, said without loading Gluon."""

from __future__ import annotations

import importlib.metadata
from functools import lru_cache

import torch

from dynaxx.kernels.problem import AttentionProblem

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
BLOCKS = (64, 128)
TRITON = (3, 6)  # Gluon's interface moves with every release: these are tried


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why these kernels cannot serve; an empty list means they can."""
    reasons = []
    if problem.device.type != "cuda" or not torch.cuda.is_available():
        reasons.append(f"runs on a Hopper GPU, got tensors on {problem.device}")
    elif _capability(problem.device)[0] != 9:
        reasons.append(f"runs on Hopper (compute capability 9.x), got {_capability(problem.device)}")
    elif _triton_version() != TRITON:
        reasons.append(f"is written for Gluon of triton {TRITON[0]}.{TRITON[1]}, got {_triton_version()}")
    if problem.dtype not in DTYPES:
        reasons.append(f"serves fp16 and bf16, got {problem.dtype}")
    if problem.head_dim not in HEAD_DIMS or problem.head_dim_v != problem.head_dim:
        reasons.append(f"serves head_dim {HEAD_DIMS} for q, k and v, got {problem.head_dim}/{problem.head_dim_v}")
    if any(size not in BLOCKS for size in problem.block_size):
        reasons.append(f"serves blocks of {BLOCKS}, got {problem.block_size}")
    return reasons


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=1)
def _triton_version() -> tuple[int, ...] | None:
    """(major, minor) of the installed Triton, None without one."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in version.split(".")[:2])
