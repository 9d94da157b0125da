# SPDX-License-Identifier: Apache-2.0
"""The problems that the Hopper backend serves, answered without loading Gluon."""

from __future__ import annotations

import torch

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.attention.hopper.config import tile_width
from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.selection.contract import QueryScoresProblem
from dynaxx.kernels.trials import triton_version

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = range(64, 257, 8)  # head_dim of q and k; TMA needs rows that are multiples of 16 bytes
BLOCKS = (64, 128)
SCORED_DIMS = (64, 128)  # head_dim of keys that are scored by one query per row


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return the reasons why the attention kernels cannot serve; empty if they can."""
    reasons = device_reasons(problem.device)
    if problem.dtype not in DTYPES:
        reasons.append(f"serves fp16 and bf16, got {problem.dtype}")
    if problem.head_dim not in HEAD_DIMS or not _fits_v(problem.head_dim, problem.head_dim_v):
        reasons.append(
            "serves head_dim from 64 to 256 in steps of 8, with a head_dim of v that fits into tiles of q and k, "
            f"got {problem.head_dim}/{problem.head_dim_v}"
        )
    if problem.biased:
        reasons.append("adds no position bias to scores")
    if any(size not in BLOCKS for size in problem.block_size):
        reasons.append(f"serves blocks of {BLOCKS}, got {problem.block_size}")
    return reasons


def device_reasons(device: torch.device) -> list[str]:
    """Return why no kernel of this backend runs on a device; empty if they do."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return [f"runs on a Hopper GPU, got tensors on {device}"]
    if not gpu_of(device).has_wgmma:
        return [f"runs on NVIDIA Hopper (sm_90), got {gpu_of(device)}"]
    return [] if triton_version() else ["triton is not installed: pip install triton"]


def _fits_v(head_dim: int, head_dim_v: int) -> bool:
    """Return whether rows of v fit into the tiles of q and k, and those are at most twice as wide."""
    return head_dim_v % 8 == 0 and tile_width(head_dim) // 2 <= head_dim_v <= tile_width(head_dim)


def query_scores_reasons(problem: QueryScoresProblem) -> list[str]:
    """Return why the kernel of scores by one query per row cannot serve; empty if it can."""
    reasons = device_reasons(problem.device)
    if problem.dtype not in DTYPES or problem.head_dim not in SCORED_DIMS or problem.kv_block not in BLOCKS:
        reasons.append(
            f"serves fp16 and bf16 of head_dim {SCORED_DIMS} in blocks of {BLOCKS}, "
            f"got {problem.dtype} of head_dim {problem.head_dim} in blocks of {problem.kv_block}"
        )
    if not problem.aligned:
        reasons.append("reads rows of keys that begin at multiples of 16 bytes")
    return reasons
