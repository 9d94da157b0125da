# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch, O(visited blocks): gather the blocks of each row and attend densely to them.

Used if there is no C++ core. Exact like every backend, and differentiable by autograd. Rows that visit equally many
blocks are processed together, in chunks that fit into the cache.

Legend: B batch; Hq, Hk query and kv heads; N queries, M keys; D head_dim of q and k, E head_dim of v; U units, one per
row of blocks of one q head; S keys that a unit visits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.kernels.sinks import add_sinks
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import on_host

CHUNK_BYTES = 4 << 20  # gathered k, v and scores per chunk; 1 to 8 MiB are equally fast, larger chunks are slower


@dataclass(frozen=True)
class Units:
    """Rows of blocks of individual q heads."""

    batch: Tensor  # (U,) int64
    head: Tensor  # (U,) int64, q head
    row: Tensor  # (U,) int64, q block
    start: Tensor  # (U,) int64, index of the first entry in `kv_indices`
    count: Tensor  # (U,) int64, number of visited blocks

    def __getitem__(self, chosen: Tensor) -> Units:
        """Return the chosen rows."""
        return Units(self.batch[chosen], self.head[chosen], self.row[chosen], self.start[chosen], self.count[chosen])


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
    out_dtype, dtype = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    batch, seqlen_q, q_heads = q.shape[:3]
    out = torch.zeros(batch * seqlen_q * q_heads, v.shape[-1], dtype=dtype)
    lse = torch.full((batch * seqlen_q * q_heads,), -torch.inf, dtype=dtype)
    table = torch.cat([layout.masks.to_dense(), torch.ones(1, *layout.block_size, dtype=torch.bool)])  # [-1] is full
    places, outs, lses = [], [], []
    for units in _chunks(layout, batch, q_heads, k.shape[-1] + v.shape[-1]):
        place, in_range = _query_places(units, layout, q_heads)
        unit_out, unit_lse = _attend(units, q, k, v, layout, table, scale, softcap, bias)
        places.append(place[in_range])
        outs.append(unit_out[in_range])
        lses.append(unit_lse[in_range])
    if places:
        where = (torch.cat(places),)
        out, lse = out.index_put(where, torch.cat(outs)), lse.index_put(where, torch.cat(lses))
    out, lse = out.view(batch, seqlen_q, q_heads, v.shape[-1]), lse.view(batch, seqlen_q, q_heads).transpose(1, 2)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.to(out_dtype), lse.contiguous()


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
    """Return dq, dk, dv by autograd through a second forward pass without sinks."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        bias = bias if bias is None or dbias is None else bias.detach().requires_grad_()
        alone, lse_alone = attention_forward(q, k, v, layout, scale, softcap, bias=bias)
    if not alone.requires_grad:  # no row visits anything
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # With sinks included in `lse`, out = share * alone. Without sinks, share = 1.
    share = (lse_alone.detach() - lse).exp().masked_fill_(lse_alone == -torch.inf, 0.0)
    weight = share.transpose(1, 2)[..., None]
    product = (do.to(lse.dtype) * alone.detach()).sum(-1).transpose(1, 2)
    dlse_alone = product * share * (1 - share)
    if dlse is not None:
        dlse_alone = dlse_alone + dlse * share
    given = [(do * weight).to(alone.dtype), dlse_alone]
    leaves = [q, k, v] if bias is None or dbias is None else [q, k, v, bias]
    dq, dk, dv, *of_bias = torch.autograd.grad([alone, lse_alone], leaves, given)
    if dbias is not None:
        dbias += of_bias[0]
    return dq, dk, dv


def _chunks(layout: BlockLayout, batch: int, q_heads: int, row_size: int) -> list[Units]:
    """List all units that visit any block, grouped by number of blocks, in chunks of CHUNK_BYTES of gathered rows."""
    shape = (batch, q_heads, layout.q_blocks)
    of_layout = lambda x: x.expand(*shape).flatten().long()
    b, h, i = (x.flatten() for x in torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
    units = Units(b, h, i, of_layout(layout.kv_indptr[..., :-1]), of_layout(layout.kv_num_blocks))
    chunks = []
    q_block, kv_block = layout.block_size
    for count in units.count.unique().tolist():
        if count:
            unit_bytes = 4 * count * kv_block * (row_size + 2 * q_block)
            chosen = (units.count == count).nonzero().flatten()
            chunks += [units[some] for some in chosen.split(max(1, CHUNK_BYTES // unit_bytes))]
    return chunks


def _query_places(units: Units, layout: BlockLayout, q_heads: int) -> tuple[Tensor, Tensor]:
    """Return the flat index (batch, token, head) of each unit's queries, and which queries exist; both (U, q_block)."""
    token = units.row[:, None] * layout.block_size[0] + torch.arange(layout.block_size[0], device="cpu")
    place = (units.batch[:, None] * layout.seqlen_q + token) * q_heads + units.head[:, None]
    return place, token < layout.seqlen_q


def _attend(
    units: Units,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    table: Tensor,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out (U, q_block, E) and lse (U, q_block) of units that visit equally many blocks."""
    q_block, kv_block = layout.block_size
    entries = units.start[:, None] + torch.arange(int(units.count[0]), device="cpu")
    cols, mask_ids = layout.kv_indices[entries].long(), layout.kv_masks[entries].long()
    keys = (cols[..., None] * kv_block + torch.arange(kv_block, device="cpu")).flatten(1)  # (U, S)
    visible = table[mask_ids].transpose(1, 2).flatten(2) & (keys < layout.seqlen_k)[:, None]  # (U, q_block, S)
    queries = (units.row[:, None] * q_block + torch.arange(q_block, device="cpu")).clamp(max=layout.seqlen_q - 1)
    keys = keys.clamp(max=layout.seqlen_k - 1)
    batch, head = units.batch[:, None], units.head[:, None]
    kv_head = head // (q.shape[2] // k.shape[2])
    scores = (q[batch, queries, head] * scale) @ k[batch, keys, kv_head].mT
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = (
            scores + bias[batch[..., None], head[..., None], queries[..., None] - keys[:, None] + layout.seqlen_k - 1]
        )
    sees_any = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~sees_any, 0.0)
    out = (scores.softmax(-1) * sees_any) @ v[batch, keys, kv_head]
    return out, scores.logsumexp(-1).masked_fill(~sees_any[..., 0], -torch.inf)
