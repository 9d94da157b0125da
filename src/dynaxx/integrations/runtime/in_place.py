# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence over keys that may stay in the pages of a cache, written into the caller's output."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from dynaxx.errors import UnsupportedInputError
from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.registry import ATTENTION
from dynaxx.layout import BlockLayout
from dynaxx.layout.paging import SequenceKeys
from dynaxx.ops.checks import check_values
from dynaxx.ops.dispatch import backend_for, score_options

PLACED = ("hopper", "triton")  # backends that find a block by its index alone


def attend_in_place(
    q: Tensor,
    keys: SequenceKeys,
    layout: BlockLayout,
    out: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> str:
    """Attend as `sparse_attention` does, without gradients, and write the result to `out`. Return the backend's name.

    Args:
        q: (1, seqlen_q, q_heads, head_dim), aligned to the last keys.
        keys: the keys and values of the sequence.
        layout: a causal layout for them.
        out: (1, seqlen_q, q_heads, head_dim_v), any strides.
        scale: softmax scale.
        softcap: cap of the scores, or None.
        sinks: (q_heads,) logits added to the denominators, or None.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `sparse_attention`; keys in pages need a backend of a GPU.
    """
    if keys.places is None:
        backend, _ = backend_for(q, keys.k, keys.v, layout, softcap, "auto")
    else:
        check_values(layout)
        problem = problem_of(q, keys, layout.block_size, softcap)
        backend = _placed_backend(problem) or ""
        if not backend:
            raise UnsupportedInputError(f"{problem} over keys in pages", ATTENTION.explain(problem))
    options = score_options(softcap, sinks)
    ATTENTION.kernels(backend).attention_forward(q, keys.k, keys.v, keys.moved(layout), scale, **options, out=out)
    return backend


def serves_in_place(q: Tensor, keys: SequenceKeys, block_size: tuple[int, int], softcap: float | None) -> bool:
    """Return whether a backend reads these keys in the pages of a cache, for q (1, seqlen_q, q_heads, head_dim)."""
    return q.dtype == keys.k.dtype and _placed_backend(problem_of(q, keys, block_size, softcap)) is not None


def problem_of(q: Tensor, keys: SequenceKeys, block_size: tuple[int, int], softcap: float | None) -> AttentionProblem:
    """Describe attention of one sequence, q (1, seqlen_q, q_heads, head_dim), over its keys."""
    return AttentionProblem(
        device=q.device, dtype=q.dtype, batch=1, seqlen_q=q.shape[1], seqlen_k=keys.seqlen_k, q_heads=q.shape[2],
        kv_heads=keys.k.shape[2], head_dim=q.shape[3], head_dim_v=keys.v.shape[3], block_size=block_size,
        needs_grad=False, softcap=softcap,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _placed_backend(problem: AttentionProblem) -> str | None:
    """Return the first backend that serves a problem with keys in pages, or None."""
    return next((name for name in PLACED if not ATTENTION.reasons(name, problem)), None)
