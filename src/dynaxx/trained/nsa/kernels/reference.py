# SPDX-License-Identifier: Apache-2.0
"""Reference definition of native sparse attention (arXiv 2502.11089): windows, block scores, top-k, selection, gates.

The compressed branch is attention over a `Compressed` pattern, and the window branch over a `SlidingWindow`;
`kernels.attention.reference` defines both. Everything is packed; `NsaSpans` contains the positions of sequences.

Legend: T queries, M keys, L compressed tokens, C selection blocks of the longest sequence, n selected blocks; Hq, Hk
query and kv heads; Hs selection heads (one or more per kv head, each with a group of q heads); D head_dim of q and k, E
head_dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.layout.host import without_autocast
from dynaxx.trained.nsa.spans import NsaSizes, NsaSpans
from dynaxx.trained.tokens.kernels.reference import attention
from dynaxx.trained.tokens.spans import TokenSpans, best_of

selected_forward, selected_backward = attention.forward, attention.backward  # the plan is a mask
pooling = gating = fused = None  # computed here in torch, and differentiated by autograd


def compression_windows(x: Tensor, spans: NsaSpans) -> Tensor:
    """Return (L, cmp_block, H, D) of x (M, H, D): the tokens behind each compressed token. Differentiable.

    The result is built from cmp_block / cmp_stride parts, none of which reads a token twice, so the gradient has a
    fixed order of summation.
    """
    stride, equal = spans.sizes.cmp_stride, spans.equal_lengths
    if equal is not None and x.shape[0]:  # use slices instead of gathers
        count = spans.sizes.compressed(equal.seqlen_k)
        by_sequence = x.unflatten(0, (equal.num_seqs, equal.seqlen_k))
        part = lambda begin: by_sequence[:, begin : begin + count * stride].unflatten(1, (count, stride))
        return torch.cat([part(begin) for begin in range(0, spans.sizes.cmp_block, stride)], dim=2).flatten(0, 1)
    steps = spans.cmp_start.long()[:, None] + torch.arange(stride, device=x.device)
    gather = lambda rows: x.index_select(0, rows.flatten()).unflatten(0, rows.shape)
    return torch.cat([gather(steps + begin) for begin in range(0, spans.sizes.cmp_block, stride)], dim=1)


def compression_means(x: Tensor, spans: NsaSpans) -> Tensor:
    """Return (L, H, D) of x (M, H, D): the mean of each window, in x's dtype. Differentiable.

    If all sequences have equal lengths, each stride is summed only once, in fp32.
    """
    sizes, equal = spans.sizes, spans.equal_lengths
    count = sizes.compressed(equal.seqlen_k) if equal is not None else 0
    if equal is None or not count:
        return compression_windows(x, spans).mean(1)
    parts = sizes.cmp_block // sizes.cmp_stride
    strides = (count + parts - 1, sizes.cmp_stride)
    used = x.unflatten(0, (equal.num_seqs, equal.seqlen_k))[:, : strides[0] * strides[1]].unflatten(1, strides)
    sums = used.sum(2, dtype=torch.promote_types(x.dtype, torch.float32))
    total = sum((sums[:, i : i + count] for i in range(1, parts)), sums[:, :count])
    return (total / sizes.cmp_block).to(x.dtype).flatten(0, 1)


@without_autocast
def selection_scores(q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NsaSpans, heads: int, scale: float) -> Tensor:
    """Return the scores of selection blocks, (T, Hs, C), eq. 9 and 10.

    Each compressed token adds its attention weight, summed over the q heads of a selection head, to a block once for
    every stride of tokens that lies in both. With `sizes.pool` "max", a block's score is the largest weight of the
    compressed tokens that overlap it.

    Args:
        q: (T, Hq, D).
        k_cmp: (L, Hk, D).
        lse: (Hq, T) of the attention to compressed tokens; None: use q @ k_cmp itself as scores, which requires
            cmp_block = cmp_stride = slc_block and one q head per selection head (MoBA).
        spans: lengths of the sequences.
        heads: number of selection heads.
        scale: softmax scale.

    Returns:
        Scores in fp32 (fp64 for fp64). Blocks without a visible compressed token have score 0, or without `lse` the
        lowest finite number.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = k_cmp.shape[1]
    wide_k = k_cmp.to(dtype).repeat_interleave(q.shape[1] // group, 1)
    logits = torch.einsum("thd,lhd->htl", q.to(dtype), wide_k) * scale
    rows = torch.arange(spans.ends_cmp[-1], device=q.device)
    local = rows - spans.first_cmp[:, None]  # (T, L)
    visible = (local >= 0) & (local < spans.num_cmp[:, None])
    block = torch.arange(spans.max_blocks, device=q.device)
    strides = spans.sizes.slc_block // spans.sizes.cmp_stride
    begin, length = local[..., None], spans.sizes.cmp_block // spans.sizes.cmp_stride
    shared = torch.minimum(begin + length, (block + 1) * strides) - torch.maximum(begin, block * strides)
    shared = shared.clamp(min=0) * visible[..., None]  # (T, L, C), in strides
    if lse is None:
        scores = logits.new_full((*logits.shape[:2], spans.max_blocks), torch.finfo(dtype).min)
        head, query, column = (shared.amax(-1) > 0).expand_as(logits).nonzero(as_tuple=True)
        scores[head, query, local[query, column]] = logits[head, query, column]
        return scores.transpose(0, 1)
    weights = (logits - lse[..., None]).masked_fill(~visible, -torch.inf).exp()
    weights = weights.unflatten(0, (heads, -1)).sum(1)
    if spans.sizes.pool == "max":
        shares = torch.nn.functional.pad(weights[..., None] * (shared > 0), (0, 0, 0, 1))  # 0 if nothing is shared
        return shares.amax(2).transpose(0, 1)
    return torch.einsum("htl,tlc->thc", weights, shared.to(dtype))


def choose_blocks(scores: Tensor, num_blocks: Tensor, sizes: NsaSizes) -> Tensor:
    """Return (T, Hs, n) int32 for scores (T, Hs, C): forced blocks, then the best visible ones; ascending, -1 = empty.

    A query that sees fewer than n blocks selects all of them. For equal scores, the first block wins.
    """
    column = torch.arange(scores.shape[-1], device=scores.device)
    forced = (column < sizes.first_blocks) | (column >= num_blocks[:, None] - sizes.local_blocks)
    return best_of(scores.masked_fill(forced[:, None], torch.inf), num_blocks[:, None], sizes.slc_count)


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NsaSpans, heads: int, scale: float) -> Tensor:
    """Return block indices (T, Hs, n) int32: `choose_blocks` of `selection_scores`."""
    return choose_blocks(selection_scores(q, k_cmp, lse, spans, heads, scale), spans.num_blocks, spans.sizes)


def schedule_of(group_size: int, kv_block: int) -> str:
    """Describe the order of processing in words, for `explain_selected`."""
    return "as dense attention under a mask of queries x keys"


def prepare_selected(block_indices: Tensor, spans: NsaSpans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the plan that forward and backward share: a mask (Hs, T, M)."""
    return attention.token_mask(block_indices, TokenSpans(spans.ends_q, spans.ends_k, spans.sizes.slc_block))


def gated_sum(outs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Return g_cmp * out_cmp + g_slc * out_slc + g_swa * out_swa, each (T, Hq, E); gates (T, Hq, 3). Differentiable."""
    dtype = torch.promote_types(outs[0].dtype, torch.float32)
    cmp, slc, swa = (out.to(dtype) * gates[..., i, None].to(dtype) for i, out in enumerate(outs))
    return (cmp + slc + swa).to(outs[0].dtype)
