# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch, O(visited blocks): the definition, for the keys that a row of blocks visits.

Used if there is no C++ core. Exact like every backend, and differentiable by autograd.

Legend: B batch; Hq, Hk query and kv heads; N queries, M keys; D head_dim of q and k, E head_dim of v; S keys of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.attention.softmax import masked_attention, masked_gradients
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import on_host


class Row(NamedTuple):
    """A row of blocks, for some batch entries and the q heads of one kv head."""

    batch: slice
    heads: slice
    queries: slice
    kv_head: slice
    keys: Tensor  # (S,) int64
    visible: Tensor  # (queries, S) bool

    def seen(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the keys or the values that the row visits, (B, S, 1, head_dim)."""
        return x[self.batch, :, self.kv_head][:, self.keys].to(dtype)

    def bias(self, table: Tensor | None, seqlen_k: int) -> Tensor | None:
        """Return the bias of the row's pairs, (B, heads, queries, S); None for None."""
        return None if table is None else table[self.batch, self.heads, self.entries(seqlen_k)]

    def entries(self, seqlen_k: int) -> Tensor:
        """Return the entry of a table of biases for each pair, (queries, S)."""
        return torch.arange(self.queries.start, self.queries.stop, device="cpu")[:, None] - self.keys + seqlen_k - 1


@on_host
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, N, Hq, E) in q's dtype and lse (B, Hq, N) in fp32 (fp64 for fp64), like the reference."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
    if sinks is not None:
        lse[:] = sinks.to(dtype)[:, None]
    for row in _rows(layout, q.shape[2], k.shape[2]):
        heads = row.heads.stop - row.heads.start
        keys, values = (row.seen(x, dtype).expand(-1, -1, heads, -1) for x in (k, v))
        own, logits = q[row.batch, row.queries, row.heads], None if sinks is None else sinks[row.heads]
        found = masked_attention(own, keys, values, row.visible, scale, softcap, logits, row.bias(bias, k.shape[1]))
        out[row.batch, row.queries, row.heads], lse[row.batch, row.heads, row.queries] = found
    return out, lse


@on_host
def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v; a given dbias, a table like the bias, receives its gradient."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for row in _rows(layout, q.shape[2], k.shape[2]):
        own, of_rows = (row.batch, row.queries, row.heads), (row.batch, row.heads, row.queries)
        keys, values = (row.seen(x, lse.dtype) for x in (k, v))
        saved = SavedForward(q[own].to(lse.dtype), keys, values, out[own], lse[of_rows])
        dlse_here, of_pairs = None if dlse is None else dlse[of_rows], row.bias(bias, k.shape[1])
        grads = masked_gradients(do[own], dlse_here, saved, row.visible, scale, softcap, of_pairs)
        dq[own] = grads[0]
        for total, part in ((dk, grads[1]), (dv, grads[2])):
            total[row.batch, :, row.kv_head].index_add_(1, row.keys, part)
        if dbias is not None:
            sums = dbias[row.batch, row.heads]
            sums.index_add_(-1, row.entries(k.shape[1]).flatten(), grads[3].flatten(-2).to(dbias.dtype))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _rows(layout: BlockLayout, q_heads: int, kv_heads: int) -> Iterator[Row]:
    """Yield the rows that visit any block."""
    full = torch.ones(1, *layout.block_size, dtype=torch.bool, device="cpu")
    table = torch.cat([layout.masks.to_dense(), full])  # [-1] is full
    (q_block, kv_block), group = layout.block_size, q_heads // kv_heads
    inside = torch.arange(kv_block, device="cpu")
    step = group if layout.layout_heads == 1 else 1
    for b, per_head in enumerate(layout.kv_indptr.tolist()):
        batch = slice(None) if layout.layout_batch == 1 else slice(b, b + 1)
        for first in range(0, q_heads, step):
            ends = per_head[first if len(per_head) > 1 else 0]
            kv_head = slice(first // group, first // group + 1)
            for row, (begin, end) in enumerate(pairwise(ends)):
                if begin == end:
                    continue
                keys = (layout.kv_indices[begin:end].long()[:, None] * kv_block + inside).flatten()
                queries = slice(row * q_block, min((row + 1) * q_block, layout.seqlen_q))
                visible = table[layout.kv_masks[begin:end].long()].transpose(0, 1).flatten(1)
                visible, there = visible[: queries.stop - queries.start], keys < layout.seqlen_k
                yield Row(batch, slice(first, first + step), queries, kv_head, keys[there], visible[:, there])
