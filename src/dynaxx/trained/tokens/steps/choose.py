# SPDX-License-Identifier: Apache-2.0
"""`index_decode`: an indexer's choice in a decoding step, over keys in pages. Compilers trace into it."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.rounding import to_fp8, to_int8
from dynaxx.ops.checks import looks_at_values
from dynaxx.trained.tokens.choice import TopKTokens
from dynaxx.trained.tokens.indexer import Precision
from dynaxx.trained.tokens.kernels.index_pages import best_blocks, rows_of_pages


@typed
@torch.no_grad()
def index_decode(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    choice: TopKTokens,
    seqused_k: Tensor,
    *,
    page_table: Tensor | None = None,
    precision: Precision = "fp32",
) -> Tensor:
    """Choose tokens for the last queries of each sequence by an indexer, as `index_tokens`, for `selected_decode`.

    The scores of these queries are held in memory. Lengths are read on their device only, so `torch.compile` traces
    the step without a graph break, and a CUDA graph captures it.

    Args:
        index_q: (batch, seqlen_q, index_heads, index_dim): the last queries, whose keys are in `index_k` already.
        index_k: (num_pages, page_size, index_dim) with `page_table`, else (batch, seqlen_k, index_dim).
        index_weights: (batch, seqlen_q, index_heads).
        choice: the number of tokens, and of neighbours that are chosen together.
        seqused_k: (batch,) int32, keys in use.
        page_table: (batch, max_pages) int32, physical page of each logical page; -1 for none.
        precision: as in `index_tokens`.

    Returns:
        block_indices (batch, seqlen_q, 1, choice.slots) int32: ascending, with -1 at the end. Of equal scores the
        earlier block wins.

    Raises:
        ValueError, TypeError: inputs that do not fit together. Values are checked on a CPU, on a GPU only with
            DYNAXX_DEBUG=1.
    """
    _check_indexer(index_q, index_k, index_weights, seqused_k, page_table)
    if not torch.compiler.is_compiling() and looks_at_values(index_q.device):
        _check_lengths(index_k, seqused_k, page_table)
    if precision not in ("fp32", "bf16", "fp8", "int8"):
        raise ValueError(f"`precision` must be 'fp32', 'bf16', 'fp8' or 'int8', got {precision!r}")
    k, there = (index_k, None) if page_table is None else rows_of_pages(index_k, page_table)
    q, weights, k_scale = index_q, index_weights.float(), None
    if precision == "bf16":
        q, k = q.bfloat16(), k.bfloat16()
    elif precision != "fp32":
        to_8_bits = to_fp8 if precision == "fp8" else to_int8
        (q, q_scale), (k, k_scale) = to_8_bits(q), to_8_bits(k)
        weights = weights * q_scale
    seqlen_q, keys = index_q.shape[1], k.shape[1]
    position = seqused_k[:, None] - seqlen_q + torch.arange(seqlen_q, device=q.device)
    visible = torch.arange(keys, device=q.device) <= position[..., None]
    if there is not None:
        visible = visible & there[:, None]
    return best_blocks(q.float(), k.float(), weights, k_scale, visible, choice.block_size, choice.slots)


def _check_indexer(q: Tensor, k: Tensor, weights: Tensor, seqused_k: Tensor, page_table: Tensor | None) -> None:
    if q.ndim != 4 or k.ndim != 3 or weights.shape != q.shape[:3] or q.shape[3] != k.shape[2]:
        raise ValueError(
            "`index_q` must be (batch, seqlen_q, index_heads, index_dim), `index_k` (num_pages, page_size, index_dim) "
            "or (batch, seqlen_k, index_dim), and `index_weights` (batch, seqlen_q, index_heads), "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(weights.shape)}"
        )
    if not all(x.is_floating_point() for x in (q, k, weights)):
        raise TypeError(f"an indexer's inputs must be floats, got {q.dtype}, {k.dtype} and {weights.dtype}")
    batch = q.shape[0]
    if seqused_k.shape != (batch,) or seqused_k.dtype != torch.int32:
        raise ValueError(f"`seqused_k` must be ({batch},) int32, got {tuple(seqused_k.shape)} {seqused_k.dtype}")
    if page_table is None:
        if k.shape[0] != batch:
            raise ValueError(f"`index_k` must have batch {batch}, got {k.shape[0]}; pages need `page_table`")
    elif page_table.ndim != 2 or page_table.shape[0] != batch or page_table.dtype != torch.int32:
        raise ValueError(
            f"`page_table` must be ({batch}, max_pages) int32, got {tuple(page_table.shape)} {page_table.dtype}"
        )
    elif not k.shape[0] or not k.shape[1]:
        raise ValueError(f"`index_k` must have pages of at least one token, got {tuple(k.shape)}")
    for name, x in (("index_k", k), ("index_weights", weights), ("seqused_k", seqused_k), ("page_table", page_table)):
        if x is not None and x.device != q.device:
            raise ValueError(f"`{name}` must be on the device of `index_q`, {q.device}, got {x.device}")


def _check_lengths(k: Tensor, seqused_k: Tensor, page_table: Tensor | None) -> None:
    """Raise ValueError for lengths and pages that the keys do not have."""
    room = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    used = seqused_k.tolist()
    if used and (min(used) < 0 or max(used) > room):
        raise ValueError(f"`seqused_k` must be from 0 to {room}, got {min(used)} to {max(used)}")
    if page_table is not None and page_table.numel():
        least, most = (int(x) for x in page_table.aminmax())
        if least < -1 or most >= k.shape[0]:
            raise ValueError(f"`page_table` must hold -1 or pages below {k.shape[0]}, got {least} to {most}")
