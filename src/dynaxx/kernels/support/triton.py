# SPDX-License-Identifier: Apache-2.0
"""The problems that the Triton backend serves, answered without loading Triton."""

from __future__ import annotations

import importlib.util

import torch

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.decode.contract import DecodeProblem
from dynaxx.kernels.device import interpreted
from dynaxx.kernels.selection.contract import QueryScoresProblem, SelectionProblem

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 512
MAX_PAGES = 16384  # scores that one program ranks in registers
MAX_LISTS = 8192
MAX_COLUMNS = 1 << 14  # kv blocks; a row of scores stays in registers


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return the reasons why the attention kernels cannot serve; empty if they can."""
    reasons = [*device_reasons(problem.device), *dtype_reasons(problem.device, problem.dtype)]
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        reasons.append(f"serves head_dim up to {MAX_HEAD_DIM}, got {problem.head_dim}/{problem.head_dim_v}")
    return reasons


def device_reasons(device: torch.device) -> list[str]:
    """Return why no kernel of this backend runs on a device; empty if they do."""
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return [f"runs on a GPU (or under TRITON_INTERPRET=1), got tensors on {device}"]
    return [] if importlib.util.find_spec("triton") else ["triton is not installed: pip install triton"]


def dtype_reasons(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why kernels cannot compute in a dtype; empty if they can."""
    if dtype not in DTYPES:
        return [f"serves fp16, bf16 and fp32, got {dtype}"]
    interprets_bf16 = dtype == torch.bfloat16 and device.type == "cpu"
    return ["Triton's interpreter does not multiply bf16"] if interprets_bf16 else []


def decode_reasons(problem: DecodeProblem) -> list[str]:
    """Return the reasons why the decode kernels cannot serve; empty if they can."""
    reasons = [*device_reasons(problem.device), *dtype_reasons(problem.device, problem.dtype)]
    if problem.cache_dtype == torch.float64:
        reasons.append(f"serves caches of up to 32 bits, got {problem.cache_dtype}")
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        reasons.append(f"serves head_dim up to {MAX_HEAD_DIM}, got {problem.head_dim}/{problem.head_dim_v}")
    if problem.max_seqlen_k > MAX_PAGES * problem.page_size:
        reasons.append(f"selects among {MAX_PAGES} pages, got more: use pages of more than {problem.page_size} tokens")
    if problem.batch * problem.kv_heads > MAX_LISTS:
        reasons.append(f"serves up to {MAX_LISTS} sequences times kv heads, got {problem.batch * problem.kv_heads}")
    return reasons


def selection_reasons(problem: SelectionProblem) -> list[str]:
    """Return the reasons why the selection kernels cannot serve; empty if they can."""
    if problem.device.type != "cuda":  # the interpreter serves no selection
        return [f"runs on a GPU, got tensors on {problem.device}"]
    reasons = device_reasons(problem.device)
    if 0 in (problem.q_blocks, problem.kv_blocks):
        reasons.append("there are no blocks to select from")
    if problem.kv_blocks is not None and problem.kv_blocks > MAX_COLUMNS:
        reasons.append(f"selects among up to {MAX_COLUMNS} blocks per row, got {problem.kv_blocks}: use larger blocks")
    if not problem.by_amount:
        reasons.append(f"selects by a number, a share or a threshold, got {problem.rule}")
    return reasons


def query_scores_reasons(problem: QueryScoresProblem) -> list[str]:
    """Return the reasons why the kernel of scores by one query per row cannot serve; empty if it can."""
    return selection_reasons(SelectionProblem(problem.device))
