# SPDX-License-Identifier: Apache-2.0
"""The branches of native sparse attention: compressed tokens, selected blocks and a window, and their gated sum.

Legend: T packed queries, Hq q heads, E head_dim of v.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.derivatives import first_derivative_only
from dynaxx.kernels.registry import ATTENTION
from dynaxx.layout import BlockLayout, pack_layouts
from dynaxx.ops.attention import sparse_attention
from dynaxx.ops.dispatch import backend_for
from dynaxx.patterns.compressed import Compressed
from dynaxx.patterns.local import SlidingWindow
from dynaxx.patterns.packed import packed_layout
from dynaxx.trained.nsa.kernels import reference as definition
from dynaxx.trained.nsa.kernels.contract import FusedBranches, Gating
from dynaxx.trained.nsa.spans import EqualLengths, NsaSpans
from dynaxx.trained.packing import Packed
from dynaxx.trained.registry import NSA

LAYOUT_BLOCK = {"cpu": 64}  # block size by device type; 128 for all others


def compressed_attention(
    packed: Packed, k_cmp: Tensor, v_cmp: Tensor, spans: NsaSpans, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) and lse (Hq, T) of attention to the compressed tokens."""
    return _attend(
        packed.q, k_cmp, v_cmp, compressed_layout(spans, layout_block(packed.q)), spans.equal_lengths, scale, backend
    )


def compressed_layout(spans: NsaSpans, block_size: int) -> BlockLayout:
    """Return the layout of queries over compressed tokens, cached with the spans; equal sequences share one."""
    sizes, equal = spans.sizes, spans.equal_lengths
    build = lambda queries, keys: Compressed(sizes.cmp_block, sizes.cmp_stride, keys - queries).layout(
        queries,
        sizes.compressed(keys),
        causal=False,
        block_size=block_size,
        device="cpu" if equal is None else spans.device,
    )
    if equal is not None:
        return build(equal.seqlen_q, equal.seqlen_k)
    layout = spans.layouts.get(block_size)
    if layout is None:
        lengths = zip(pairwise(spans.ends_q), pairwise(spans.ends_k), strict=True)
        each = [build(b - a, d - c) if b > a and sizes.compressed(d - c) else None for (a, b), (c, d) in lengths]
        layout = pack_layouts(each, spans.ends_q, spans.ends_cmp, block_size=block_size).to(spans.device)
        spans.layouts[block_size] = layout
    return layout


def recorded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor],
    layout: BlockLayout,
    spans: NsaSpans,
    scale: float,
    backend: str,
) -> Tensor:
    """Return the output of an attention call that ran earlier, with gradients as if it ran now.

    Autograd runs backward passes in reverse order of the forward calls. This function decouples the two orders: the
    compressed branch runs first, because the selection needs its results, but is recorded last. Its backward therefore
    runs before that of the selected branch, which needs the most memory and comes last.

    Args:
        q: (T, Hq, head_dim), queries.
        k: keys that the call attended to.
        v: values that the call attended to.
        results: (out, lse) of the call.
        layout: layout of the call.
        spans: lengths of the sequences.
        scale: softmax scale.
        backend: name of the backend, or "auto".
    """
    equal, lse = spans.equal_lengths, results[1]
    q, k, v, out = (_as_batch(x, equal) for x in (q, k, v, results[0]))
    name, needs_grad = backend_for(q, k, v, layout, None, backend)
    if not needs_grad:
        return out.flatten(0, 1)
    if name == "reference":
        return sparse_attention(q, k, v, layout, scale=scale, backend=name).flatten(0, 1)
    lse = lse.unflatten(1, (out.shape[0], -1)).transpose(0, 1)
    return Recorded.apply(q, k, v, out, lse, ATTENTION.kernels(name).attention_backward, layout, scale).flatten(0, 1)


class Recorded(torch.autograd.Function):
    """The result of an earlier forward over a layout, with the backend's backward."""

    @staticmethod
    @override
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backward_of, ctx.layout, ctx.scale = rest
        return out.view_as(out)

    @staticmethod
    @first_derivative_only
    @override
    def backward(ctx: Any, do: Tensor) -> Any:
        *inputs, out, lse = ctx.saved_tensors
        grads = ctx.backward_of(do, torch.zeros_like(lse), *inputs, out, lse, ctx.layout, ctx.scale)
        return *grads, None, None, None, None, None


def window_attention(packed: Packed, spans: NsaSpans, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) and lse (Hq, T) of attention to the last `window` keys."""
    layout = window_layout(spans, layout_block(packed.q))
    return _attend(packed.q, packed.k, packed.v, layout, spans.equal_lengths, scale, backend)


def window_layout(spans: NsaSpans, block_size: int) -> BlockLayout:
    """Return the layout of queries over the window's keys; equal sequences share one."""
    equal, window = spans.equal_lengths, SlidingWindow(spans.sizes.window)
    if equal is not None:
        return window.layout(equal.seqlen_q, equal.seqlen_k, block_size=block_size, device=spans.device)
    return packed_layout(window, spans.ends_q, spans.ends_k, block_size=block_size, device=spans.device)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, equal: EqualLengths | None, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Attend over packed tensors; as a batch if all sequences have equal lengths, so that they share a layout."""
    if equal is None:
        return sparse_attention(q, k, v, layout, scale=scale, return_lse=True, backend=backend)
    q, k, v = (_as_batch(x, equal) for x in (q, k, v))
    out, lse = sparse_attention(q, k, v, layout, scale=scale, return_lse=True, backend=backend)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def _as_batch(x: Tensor, equal: EqualLengths | None) -> Tensor:
    """View packed sequences as a batch: one entry per sequence if all lengths are equal, else a batch of one."""
    return x[None] if equal is None else x.unflatten(0, (equal.num_seqs, x.shape[0] // max(1, equal.num_seqs)))


def layout_block(q: Tensor) -> int:
    """Return the block size, in queries and keys, of the layouts of the compressed and the window branch."""
    return LAYOUT_BLOCK.get(q.device.type, 128)


def gated_sum(outs: tuple[Tensor, Tensor, Tensor], gates: Tensor, backend: str) -> Tensor:
    """Return the sum of (T, Hq, E) branches weighted by (T, Hq, 3) gates; in one kernel if the backend has one."""
    gating = NSA.kernels(backend).gating
    return definition.gated_sum(outs, gates) if gating is None else GatedSum.apply(*outs, gates, gating)


class GatedSum(torch.autograd.Function):
    """A backend's gated sum, with its gradients."""

    @staticmethod
    @override
    def forward(ctx: Any, cmp: Tensor, slc: Tensor, swa: Tensor, gates: Tensor, kernels: Gating) -> Tensor:
        ctx.save_for_backward(cmp, slc, swa, gates)
        ctx.kernels = kernels
        out: Tensor = kernels.gated_sum_forward((cmp, slc, swa), gates)
        return out

    @staticmethod
    @first_derivative_only
    @override
    def backward(ctx: Any, do: Tensor) -> Any:
        *outs, gates = ctx.saved_tensors
        return *ctx.kernels.gated_sum_backward(do, tuple(outs), gates), None


class MixedBranches(torch.autograd.Function):
    """The result of a backend that fuses the branches, with the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Take q, k, v, k_cmp, v_cmp, gates; each branch's out, then lse; the sum; kernels, plan, layouts and scale."""
        *tensors, out, ctx.kernels, ctx.plan, ctx.layouts, ctx.scale = given
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    @first_derivative_only
    @override
    def backward(ctx: Any, do: Tensor) -> Any:
        kernels: FusedBranches = ctx.kernels
        tensors = ctx.saved_tensors
        inputs, gates = tensors[:5], tensors[5]
        rows, d_gates = kernels.branch_rows(do, kernels.Branches(*tensors[6:]), gates, ctx.plan, ctx.layouts[1])
        del tensors
        ctx.maybe_clear_saved_tensors()  # frees the large branch outputs, which are not read again
        grads = kernels.mixed_backward(rows, inputs, ctx.plan, ctx.layouts, ctx.scale)
        return *grads, d_gates, *[None] * 11
