# SPDX-License-Identifier: Apache-2.0
"""The indexer on the CPU: scores and choices by the core in one pass, or a few queries at a time in torch."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor
from torch.nn.functional import pad

from dynaxx.core.library import active_library
from dynaxx.core.structures import raise_for_status, structure
from dynaxx.kernels.rounding import to_fp8, to_int8
from dynaxx.layout.host import address, on_host
from dynaxx.trained.tokens.kernels.contract import IndexerProblem
from dynaxx.trained.tokens.kernels.reference import indexer as reference
from dynaxx.trained.tokens.spans import TokenSpans, best_of

__all__ = ["best_scores", "index_tokens", "to_fp8", "to_int8", "unsupported_reasons"]

ROW = 16  # floats that rows are filled up to
SCORE_BYTES = 32 << 20  # of scores held at once where there is no core
IndexArgs = structure("IndexArgs")


def unsupported_reasons(problem: IndexerProblem) -> list[str]:
    """Return why the core cannot serve: another device."""
    return [] if problem.device.type == "cpu" else [f"tensors are on {problem.device}, not on the CPU"]


@on_host
def index_tokens(
    q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, spans: TokenSpans, slots: int
) -> Tensor:
    """Return the best blocks of each query (T, 1, slots) int32, as `tokens.reference.indexer`, computed in fp32."""
    library = active_library()
    if library is None:
        return _by_chunks(q, k, weights, k_scale, spans, slots)
    row = -(-q.shape[2] // ROW) * ROW
    widen = lambda x: pad(x.detach().float(), (0, row - x.shape[-1])).contiguous()
    q_rows, k_rows, factors = widen(q), widen(k), weights.detach().float().contiguous()
    scale = None if k_scale is None else k_scale.detach().float().contiguous()
    ends_q, ends_k = torch.tensor(spans.ends_q, dtype=torch.int64), torch.tensor(spans.ends_k, dtype=torch.int64)
    chosen = torch.empty(q.shape[0], 1, slots, dtype=torch.int32)
    args = IndexArgs(
        address(q_rows, torch.float32, (spans.ends_q[-1], q.shape[1], row)),
        address(factors, torch.float32, q.shape[:2]),
        address(k_rows, torch.float32, (spans.ends_k[-1], row)),
        None if scale is None else address(scale, torch.float32, (spans.ends_k[-1],)),
        address(ends_q, torch.int64, ends_q.shape),
        address(ends_k, torch.int64, ends_q.shape),
        len(ends_q) - 1,
        q.shape[1],
        row,
        slots,
        spans.block_size,
        address(chosen, torch.int32, chosen.shape),
        torch.get_num_threads(),
    )
    raise_for_status(library.dynaxx_cpu_index_tokens(byref(args)))
    return chosen


def _by_chunks(q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, spans: TokenSpans, slots: int) -> Tensor:
    chosen = torch.full((q.shape[0], 1, slots), -1, dtype=torch.int32, device="cpu")
    for some, keys, own in spans.pieces(4 * q.shape[1], SCORE_BYTES):
        scale = None if k_scale is None else k_scale[keys]
        chosen[some] = reference.index_tokens(
            q[some].float(), k[keys].float(), weights[some].float(), scale, own, slots
        )
    return chosen


@on_host
def best_scores(scores: Tensor, counts: Tensor, slots: int) -> Tensor:
    """Return indices of the best `slots` of the first counts (rows,) scores (rows, width) fp32: ascending, then -1.

    Of equal scores the earlier one wins.
    """
    library = active_library()
    if library is None:
        return best_of(scores, counts, slots)
    scores, counts = scores.float().contiguous(), counts.int().contiguous()
    rows, width = scores.shape
    chosen = torch.empty(rows, slots, dtype=torch.int32)
    read = address(scores, torch.float32, scores.shape), rows, width, address(counts, torch.int32, (rows,))
    written = slots, torch.get_num_threads(), address(chosen, torch.int32, chosen.shape)
    raise_for_status(library.dynaxx_cpu_token_top(*read, *written))
    return chosen
