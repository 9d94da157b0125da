# SPDX-License-Identifier: Apache-2.0
"""The branches of Native Sparse Attention: compressed tokens, selected blocks and a window, and their gated sum.

Everything is packed: T queries, Hq q heads, E head_dim of v.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dynaxx.derivatives import first_derivative_only
from dynaxx.kernels.contract import FusedBranches, Gating
from dynaxx.kernels.reference import nsa as definition
from dynaxx.kernels.registry import NSA
from dynaxx.layout import BlockLayout, pack_layouts
from dynaxx.layout.nsa import NativeSpans
from dynaxx.ops.attention import sparse_attention
from dynaxx.ops.dispatch import backend_for, load_backend
from dynaxx.ops.packing import Packed
from dynaxx.patterns.compressed import Compressed
from dynaxx.patterns.local import SlidingWindow
from dynaxx.patterns.packed import packed_layout

LAYOUT_BLOCK = {"cpu": 64}  # others 128


def compressed_attention(
    packed: Packed, k_cmp: Tensor, v_cmp: Tensor, spans: NativeSpans, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Out (T, Hq, E) and lse (Hq, T) of attention over the compressed tokens."""
    return _attend(
        packed.q, k_cmp, v_cmp, compressed_layout(spans, layout_block(packed.q)), spans.uniform, scale, backend
    )


def compressed_layout(spans: NativeSpans, block_size: int) -> BlockLayout:
    """Return the layout of queries over compressed tokens, kept with the spans; one for equal sequences."""
    sizes, alike = spans.sizes, spans.uniform
    build = lambda queries, keys: Compressed(sizes.cmp_block, sizes.cmp_stride, keys - queries).layout(
        queries,
        sizes.compressed(keys),
        causal=False,
        block_size=block_size,
        device="cpu" if alike is None else spans.device,
    )
    if alike is not None:
        return build(*alike[1:])
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
    spans: NativeSpans,
    scale: float,
    backend: str,
) -> Tensor:
    """Return the first of `results`, out and lse of attention over `layout`, with its gradients, as if it ran now.

    The results of a branch may be needed before those of another whose gradients shall come later.
    Gradients go the reverse way: those of the selected branch, which need most memory, come last.
    """
    alike, lse = spans.uniform, results[1]
    q, k, v, out = (_as_batch(x, alike) for x in (q, k, v, results[0]))
    name, needs_grad = backend_for(q, k, v, layout, None, backend)
    if not needs_grad:
        return out.flatten(0, 1)
    if name == "reference":
        return sparse_attention(q, k, v, layout, scale=scale, backend=name).flatten(0, 1)
    lse = lse.unflatten(1, (out.shape[0], -1)).transpose(0, 1)
    return Recorded.apply(q, k, v, out, lse, load_backend(name).attention_backward, layout, scale).flatten(0, 1)


class Recorded(torch.autograd.Function):
    """Results of a backend's forward over a layout, with its backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backward_of, ctx.layout, ctx.scale = rest
        return out.view_as(out)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor) -> Any:
        *inputs, out, lse = ctx.saved_tensors
        grads = ctx.backward_of(do, torch.zeros_like(lse), *inputs, out, lse, ctx.layout, ctx.scale)
        return *grads, None, None, None, None, None


def window_attention(packed: Packed, spans: NativeSpans, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    """Out (T, Hq, E) and lse (Hq, T) of attention over the last `window` keys."""
    layout = window_layout(spans, layout_block(packed.q))
    return _attend(packed.q, packed.k, packed.v, layout, spans.uniform, scale, backend)


def window_layout(spans: NativeSpans, block_size: int) -> BlockLayout:
    """Return the layout of queries over the window's keys; one for all sequences that are alike."""
    alike, window = spans.uniform, SlidingWindow(spans.sizes.window)
    if alike is not None:
        return window.layout(*alike[1:], block_size=block_size, device=spans.device)
    return packed_layout(window, spans.ends_q, spans.ends_k, block_size=block_size, device=spans.device)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, alike: tuple[int, int, int] | None, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Attention of packed tensors: as a batch where sequences are alike, so that they share a layout."""
    if alike is None:
        return sparse_attention(q, k, v, layout, scale=scale, return_lse=True, backend=backend)
    q, k, v = (_as_batch(x, alike) for x in (q, k, v))
    out, lse = sparse_attention(q, k, v, layout, scale=scale, return_lse=True, backend=backend)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def _as_batch(x: Tensor, alike: tuple[int, int, int] | None) -> Tensor:
    """Packed sequences as a batch: each by itself where they are alike, else as one."""
    return x[None] if alike is None else x.unflatten(0, (alike[0], x.shape[0] // max(1, alike[0])))


def layout_block(q: Tensor) -> int:
    """Rows and keys of a block of the compressed and the window branch."""
    return LAYOUT_BLOCK.get(q.device.type, 128)


def gated_sum(outs: tuple[Tensor, Tensor, Tensor], gates: Tensor, backend: str) -> Tensor:
    """Each (T, Hq, E) branch times its (T, Hq, 3) gate, summed; in one kernel where the backend has one."""
    gating = NSA.kernels(backend).gating
    return definition.gated_sum(outs, gates) if gating is None else GatedSum.apply(*outs, gates, gating)


class GatedSum(torch.autograd.Function):
    """A backend's gated sum, with its gradients."""

    @staticmethod
    def forward(ctx: Any, cmp: Tensor, slc: Tensor, swa: Tensor, gates: Tensor, kernels: Gating) -> Tensor:
        ctx.save_for_backward(cmp, slc, swa, gates)
        ctx.kernels = kernels
        out: Tensor = kernels.gated_sum_forward((cmp, slc, swa), gates)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor) -> Any:
        *outs, gates = ctx.saved_tensors
        return *ctx.kernels.gated_sum_backward(do, tuple(outs), gates), None


class MixedBranches(torch.autograd.Function):
    """What a backend gave that mixes the branches, with the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Of q, k, v, k_cmp, v_cmp, gates; results of each branch, and lse of each; their sum; how they were made."""
        *tensors, out, ctx.kernels, ctx.plan, ctx.layouts, ctx.scale = given
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor) -> Any:
        kernels: FusedBranches = ctx.kernels
        tensors = ctx.saved_tensors
        q, k, v, k_cmp, v_cmp, gates = tensors[:6]
        rows, d_gates = kernels.branch_rows(do, kernels.Branches(*tensors[6:]), gates, ctx.plan, ctx.layouts[1])
        del tensors
        ctx.maybe_clear_saved_tensors()  # what the branches gave is read no more, and is much
        grads = kernels.mixed_backward(rows, q, k, v, k_cmp, v_cmp, ctx.plan, ctx.layouts, ctx.scale)
        return *grads, d_gates, *[None] * 11
