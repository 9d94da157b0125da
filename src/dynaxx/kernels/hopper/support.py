# SPDX-License-Identifier: Apache-2.0
"""What the Hopper kernels serve, answered without loading Gluon."""

from __future__ import annotations

from dataclasses import replace

import torch

from dynaxx.kernels.gpu.device import capability, triton_version
from dynaxx.kernels.problem import AttentionProblem

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
BLOCKS = (64, 128)
MAX_NSA_HEAD_DIM = 128
TRITON = (3, 6)  # Gluon's interface moves with every release: these are tried


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return why the attention kernels cannot serve; an empty list means that they can."""
    reasons = []
    if problem.device.type != "cuda" or not torch.cuda.is_available():
        reasons.append(f"runs on a Hopper GPU, got tensors on {problem.device}")
    elif capability(problem.device)[0] != 9:
        reasons.append(f"runs on Hopper (compute capability 9.x), got {capability(problem.device)}")
    elif triton_version() != TRITON:
        reasons.append(f"is written for Gluon of triton {TRITON[0]}.{TRITON[1]}, got {triton_version()}")
    if problem.dtype not in DTYPES:
        reasons.append(f"serves fp16 and bf16, got {problem.dtype}")
    if problem.head_dim not in HEAD_DIMS or problem.head_dim_v != problem.head_dim:
        reasons.append(f"serves head_dim {HEAD_DIMS} for q, k and v, got {problem.head_dim}/{problem.head_dim_v}")
    if any(size not in BLOCKS for size in problem.block_size):
        reasons.append(f"serves blocks of {BLOCKS}, got {problem.block_size}")
    return reasons


def nsa_reasons(problem: AttentionProblem) -> list[str]:
    """Return why the kernels of Native Sparse Attention cannot serve; a q block is a position and its group there."""
    reasons = unsupported_reasons(replace(problem, block_size=(BLOCKS[0], problem.block_size[1])))
    if problem.head_dim > MAX_NSA_HEAD_DIM:
        reasons.append(f"serves head_dim up to {MAX_NSA_HEAD_DIM} for selected blocks, got {problem.head_dim}")
    return reasons
