# SPDX-License-Identifier: Apache-2.0
"""The problems of trained sparse attention that the Hopper backend serves."""

from __future__ import annotations

from dataclasses import replace

import torch

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.support.hopper import BLOCKS, DTYPES, HEAD_DIMS, device_reasons, unsupported_reasons
from dynaxx.trained.tokens.kernels.contract import IndexerProblem

NSA_HEAD_DIMS = (64, 128)
LATENT_DIMS = (576, 512)  # of latent attention: keys, and values, which are their first part
GROUPED, GROUPED_DIM = range(4, 65), 128  # q heads per kv head, and their width, over chosen tokens
INDEX_HEADS, MANY_INDEX_HEADS = 4, (8, 16, 32, 64)  # of indexers: at most so many, or one of these
INDEX_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.int8)
INDEX_DIMS, INDEX_SLOTS = (32, 64, 128), 4096
INDEX_QUERIES = 2048  # below, too few tiles of queries fill a GPU


def nsa_reasons(problem: AttentionProblem) -> list[str]:
    """Return the reasons why the kernels of native sparse attention cannot serve; a q block is one position."""
    reasons = unsupported_reasons(replace(problem, block_size=(BLOCKS[0], problem.block_size[1])))
    if problem.head_dim not in NSA_HEAD_DIMS or problem.head_dim_v != problem.head_dim:
        sizes = f"{problem.head_dim}/{problem.head_dim_v}"
        reasons.append(f"serves head_dim {NSA_HEAD_DIMS} of q, k and v for selected blocks, got {sizes}")
    return reasons


def token_reasons(problem: AttentionProblem) -> list[str]:
    """Return why the kernels over chosen tokens cannot serve: they are for latent attention, or grouped-query heads."""
    narrow = replace(problem, head_dim=HEAD_DIMS[0], head_dim_v=HEAD_DIMS[0], block_size=(BLOCKS[0], BLOCKS[0]))
    reasons = unsupported_reasons(narrow)
    dims = (problem.head_dim, problem.head_dim_v)
    latent = dims == LATENT_DIMS and problem.kv_heads == 1
    grouped = dims == (GROUPED_DIM, GROUPED_DIM) and problem.group_size in GROUPED
    if not (latent or grouped) or problem.block_size[1] != 1:
        reasons.append(
            f"serves tokens chosen one by one, by latent attention (head_dim {LATENT_DIMS[0]}/{LATENT_DIMS[1]}, one kv "
            f"head) or {GROUPED.start} to {GROUPED.stop - 1} q heads of {GROUPED_DIM} per kv head, "
            f"got {problem.q_heads}/{problem.kv_heads} heads of {dims[0]}/{dims[1]}, blocks of {problem.block_size[1]}"
        )
    return reasons


def indexer_reasons(problem: IndexerProblem) -> list[str]:
    """Return why the kernel of indexers cannot serve; empty if it can."""
    reasons = device_reasons(problem.device)
    if problem.dtype not in INDEX_DTYPES:
        reasons.append(f"serves fp16, bf16, fp8 and int8, got {problem.dtype}")
    if (problem.heads > INDEX_HEADS and problem.heads not in MANY_INDEX_HEADS) or problem.dim not in INDEX_DIMS:
        reasons.append(
            f"serves up to {INDEX_HEADS} heads, or {MANY_INDEX_HEADS}, of one of {INDEX_DIMS}, "
            f"got {problem.heads} heads of {problem.dim}"
        )
    if problem.block_size != 1 or problem.slots > INDEX_SLOTS:
        reasons.append(
            f"serves up to {INDEX_SLOTS} tokens chosen one by one, got {problem.slots} blocks of {problem.block_size}"
        )
    if problem.queries < INDEX_QUERIES:
        reasons.append(f"serves {INDEX_QUERIES} queries or more, got {problem.queries}")
    return reasons
