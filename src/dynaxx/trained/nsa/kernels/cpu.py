# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention on the CPU: block scores in torch, selected attention in the C++ core.

The core needs blocks of 16 rows that visit the same keys. The q heads of a selection head therefore become rows: a
block of 16 rows holds the heads of one position (for a group of 16) or of a few neighbouring positions. Neighbouring
positions visit the union of their selections, and an element mask restores each position's own selection.

Legend: T queries, M keys, n selected blocks, L compressed tokens; Hq, Hk, Hs query, kv and selection heads; G q heads
per selection head; D head_dim of q and k, E head_dim of v; t, l queries and compressed tokens of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.attention.cpu.backward import attention_backward
from dynaxx.kernels.attention.cpu.forward import attention_forward
from dynaxx.layout import EMPTY, FULL, BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.host import on_host
from dynaxx.trained.nsa.kernels.reference import choose_blocks
from dynaxx.trained.nsa.kernels.reference_decode import block_scores
from dynaxx.trained.nsa.spans import NsaSpans

ROWS = 16  # the smallest q block of a layout
SCORE_BYTES = 8 << 20  # upper bound for the scores in memory
pooling = gating = fused = None  # torch computes pooling, gated sum and the combination of branches


@on_host
def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NsaSpans, heads: int, scale: float) -> Tensor:
    """Return the selected blocks like `kernels.nsa.reference.select_blocks`, in fp32, with O(SCORE_BYTES) memory."""
    chosen = torch.empty(q.shape[0], heads, spans.sizes.slc_count, dtype=torch.int32)
    keys = k_cmp.float().movedim(0, 1).repeat_interleave(heads // k_cmp.shape[1], 0)  # (Hs, L, D)
    for (a, b), (c, d) in zip(pairwise(spans.ends_q), pairwise(spans.ends_cmp), strict=True):
        step = max(1, SCORE_BYTES // (4 * q.shape[1] * max(1, d - c)))
        for first in range(a, b, step):
            some = slice(first, min(first + step, b))
            visible = int(spans.num_cmp[some.stop - 1])
            parts = _weights(
                q[some], keys[:, c : c + visible], lse if lse is None else lse[:, some], spans, some, scale
            )
            blocks = int(spans.num_blocks[some.stop - 1])
            scores = block_scores(parts, spans.sizes, blocks) if lse is not None else _unscored(parts, blocks)
            chosen[some] = choose_blocks(scores.transpose(0, 1), spans.num_blocks[some], spans.sizes)
    return chosen


def _weights(q: Tensor, keys: Tensor, lse: Tensor | None, spans: NsaSpans, some: slice, scale: float) -> Tensor:
    """Return weights (Hs, t, l) of visible compressed tokens, summed over each group; without lse, return logits."""
    heads, count = keys.shape[0], keys.shape[1]
    grouped = (q.float() * scale).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # (Hs, G, t, D)
    logits = (grouped.flatten(1, 2) @ keys.mT).unflatten(1, grouped.shape[1:3])
    hidden = torch.arange(count, device="cpu") >= spans.num_cmp[some, None]
    if lse is None:
        return logits[:, 0].masked_fill_(hidden, torch.finfo(logits.dtype).min)
    shift = lse.masked_fill(lse == -torch.inf, 0.0).unflatten(0, (heads, -1))[..., None]
    return logits.sub_(shift).masked_fill_(hidden, -torch.inf).exp_().sum(1)


def _unscored(logits: Tensor, blocks: int) -> Tensor:
    """Pad the logits of compressed tokens that are equal to blocks; missing blocks get the lowest number."""
    return pad(logits, (0, blocks - logits.shape[-1]), value=torch.finfo(logits.dtype).min)


@dataclass(frozen=True)
class CpuSelectedPlan:
    """A selection as one layout per sequence, whose rows are the q heads of each position."""

    ends_q: tuple[int, ...]
    ends_k: tuple[int, ...]
    heads: int  # selection heads
    group: int  # q heads per selection head
    rows: int  # rows per position: the group size, padded to a divisor or a multiple of ROWS
    layouts: tuple[BlockLayout, ...]


def rows_of(group_size: int) -> int:
    """Return the group size, padded to a divisor or a multiple of ROWS."""
    return next((size for size in (1, 2, 4, 8, 16) if size >= group_size), -(-group_size // ROWS) * ROWS)


def schedule_of(group_size: int, kv_block: int) -> str:
    """Describe the order of processing in words, for `explain_selected`."""
    together = max(1, ROWS // rows_of(group_size))
    return f"by query, union of {together} neighbouring positions" if together > 1 else "by query, one at a time"


@on_host
def prepare_selected(block_indices: Tensor, spans: NsaSpans, q: Tensor, k: Tensor, v: Tensor) -> CpuSelectedPlan:
    """Turn a selection into one layout per sequence, which forward and backward share."""
    heads = block_indices.shape[1]
    group = q.shape[1] // heads
    rows = rows_of(group)
    layouts = []
    for (a, b), (c, d) in zip(pairwise(spans.ends_q), pairwise(spans.ends_k), strict=True):
        layouts.append(_rows_layout(block_indices[a:b], d - c, spans.sizes.slc_block, rows))
    return CpuSelectedPlan(spans.ends_q, spans.ends_k, heads, group, rows, tuple(layouts))


def _rows_layout(block_indices: Tensor, seqlen_k: int, kv_block: int, rows: int) -> BlockLayout:
    """Return the layout of one sequence, whose rows are those of its positions.

    The mask of a visited block depends on which positions of its q block selected it, and on its distance from them.
    There are few distinct combinations, and each becomes one mask.
    """
    queries, heads, _ = block_indices.shape
    grid = BlockGrid(queries * rows, seqlen_k, (ROWS, kv_block), causal=False)
    together, parts = max(1, ROWS // rows), max(1, rows // ROWS)  # positions per q block, q blocks per position
    query, head, slot = (block_indices >= 0).nonzero(as_tuple=True)
    cell = (head * -(-queries // together) + query // together) * grid.kv_blocks + block_indices[query, head, slot]
    cells, which = cell.unique(return_inverse=True)
    chosen = torch.zeros_like(cells).index_add_(0, which, 1 << (query % together))  # bit set of positions
    tile, column = cells // max(1, grid.kv_blocks), cells % max(1, grid.kv_blocks)
    head, tile = tile // max(1, -(-queries // together)), tile % max(1, -(-queries // together))
    distance = seqlen_k - queries + tile * together - column * kv_block  # first position minus first key
    distance = distance.clamp(-together, kv_block - 1)
    kinds, kind = (chosen * (kv_block + together) + distance + together).unique(return_inverse=True)
    masks, mask_ids = _kind_masks(kinds, together, kv_block, rows)
    mask_id = mask_ids[kind].repeat_interleave(parts)
    flat_rows = (head * grid.q_blocks + tile * parts).repeat_interleave(parts) + torch.arange(
        parts, device="cpu"
    ).repeat(len(tile))
    return BlockLayout.from_entries(
        grid, flat_rows, column.repeat_interleave(parts), mask_id, masks, layout_heads=heads
    )


def _kind_masks(kinds: Tensor, together: int, kv_block: int, rows: int) -> tuple[ElementMasks, Tensor]:
    """Return the element masks of the kinds of visited blocks, and each kind's mask id; FULL and EMPTY have no mask."""
    chosen, distance = kinds // (kv_block + together), kinds % (kv_block + together) - together
    position = (
        torch.arange(ROWS, device="cpu") // rows if together > 1 else torch.zeros(ROWS, dtype=torch.int64, device="cpu")
    )
    selected = (chosen[:, None] >> position & 1).bool()
    before = distance[:, None, None] + position[:, None] - torch.arange(kv_block, device="cpu") >= 0
    dense = selected[..., None] & before
    all_set, none_set = dense.flatten(1).all(1), ~dense.flatten(1).any(1)
    cut = ~all_set & ~none_set
    mask_ids = torch.where(all_set, FULL, EMPTY)
    mask_ids[cut] = torch.arange(int(cut.sum()), device="cpu")
    return ElementMasks.from_dense(dense[cut]), mask_ids


@on_host
def selected_forward(q: Tensor, k: Tensor, v: Tensor, plan: CpuSelectedPlan, scale: float) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) in q's dtype and lse (Hq, T) in fp32; calls the core once per sequence."""
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), -torch.inf).float()
    for some, keys, layout in _sequences(plan):
        part, part_lse = attention_forward(_as_rows(q[some], plan), k[None, keys], v[None, keys], layout, scale)
        out[some] = _from_rows(part, plan)
        lse[:, some] = part_lse.unflatten(2, (-1, plan.rows))[0, ..., : plan.group].movedim(2, 1).flatten(0, 1)
    return out, lse


@on_host
def selected_backward(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: CpuSelectedPlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v."""
    q, k, v, out, lse = saved
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    per_row = lambda x, some: _as_rows(x[:, some].T[..., None], plan)[..., 0].transpose(1, 2).contiguous()
    for some, keys, layout in _sequences(plan):
        grads = attention_backward(
            _as_rows(do[some], plan),
            per_row(dlse, some),
            _as_rows(q[some], plan),
            k[None, keys],
            v[None, keys],
            _as_rows(out[some], plan),
            per_row(lse, some),
            layout,
            scale,
        )
        dq[some], dk[keys], dv[keys] = _from_rows(grads[0], plan), grads[1][0], grads[2][0]
    return dq, dk, dv


def _sequences(plan: CpuSelectedPlan) -> list[tuple[slice, slice, BlockLayout]]:
    """Return the queries, keys and layout of each sequence that has both queries and keys."""
    spans = zip(pairwise(plan.ends_q), pairwise(plan.ends_k), plan.layouts, strict=True)
    return [(slice(a, b), slice(c, d), layout) for (a, b), (c, d), layout in spans if b > a and d > c]


def _as_rows(x: Tensor, plan: CpuSelectedPlan) -> Tensor:
    """Turn x (t, Hq, D) into (1, t * rows, Hs, D): the q heads of a selection head become rows, padded with zeros."""
    split = x.unflatten(1, (plan.heads, plan.group)).transpose(1, 2)  # (t, G, Hs, D)
    return pad(split, (0, 0, 0, 0, 0, plan.rows - plan.group)).flatten(0, 1)[None]


def _from_rows(x: Tensor, plan: CpuSelectedPlan) -> Tensor:
    """Invert `_as_rows`."""
    return x[0].unflatten(0, (-1, plan.rows))[:, : plan.group].transpose(1, 2).flatten(1, 2)
