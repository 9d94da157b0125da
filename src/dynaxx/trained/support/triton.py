# SPDX-License-Identifier: Apache-2.0
"""The problems of trained sparse attention that the Triton backend serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.decode.contract import DecodeProblem
from dynaxx.kernels.support.triton import (
    MAX_HEAD_DIM,
    decode_reasons,
    device_reasons,
    dtype_reasons,
    unsupported_reasons,
)
from dynaxx.trained.tokens.kernels.contract import IndexerProblem, IndexLossProblem

P = TypeVar("P", AttentionProblem, DecodeProblem)
MAX_LATENT_DIM = 576  # of keys that all heads share, as in MLA
MAX_INDEX_BYTES = 512  # of a row of an indexer's q and k, for its loss


def token_reasons(problem: AttentionProblem) -> list[str]:
    """Return why the kernels over chosen tokens cannot serve: as attention, but latent widths, 576/512, are served."""
    return _with_latent_widths(problem, unsupported_reasons)


def token_decode_reasons(problem: DecodeProblem) -> list[str]:
    """Return why the decoding kernels over chosen tokens cannot serve: latent widths, 576/512, are served."""
    return _with_latent_widths(replace(problem, max_seqlen_k=0, batch=1), decode_reasons)


def _with_latent_widths(problem: P, reasons_of: Callable[[P], list[str]]) -> list[str]:
    dims = problem.head_dim, problem.head_dim_v
    narrow = [min(dim, MAX_HEAD_DIM) for dim in dims]
    reasons = reasons_of(replace(problem, head_dim=narrow[0], head_dim_v=narrow[1]))
    if max(dims) > MAX_LATENT_DIM:
        reasons.append(f"serves head_dim up to {MAX_LATENT_DIM}, got {dims[0]}/{dims[1]}")
    return reasons


def indexer_reasons(problem: IndexerProblem) -> list[str]:
    """Return the reasons why the indexer's kernels cannot serve; empty if they can."""
    return device_reasons(problem.device)


def index_loss_reasons(problem: IndexLossProblem) -> list[str]:
    """Return the reasons why the kernels of an indexer's loss cannot serve; empty if they can."""
    reasons = device_reasons(problem.device)
    for dtype in {problem.dtype, problem.index_dtype}:
        reasons += dtype_reasons(problem.device, dtype)
    most = MAX_INDEX_BYTES // problem.index_dtype.itemsize
    if problem.head_dim > MAX_LATENT_DIM or problem.index_dim > most:
        reasons.append(
            f"serves head_dim up to {MAX_LATENT_DIM} and, in {problem.index_dtype}, index_dim up to {most}, "
            f"got {problem.head_dim} and {problem.index_dim}"
        )
    return reasons
