# SPDX-License-Identifier: Apache-2.0
"""Checks of attention inputs that run before any backend sees them."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, described, number
from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.scale import LEAST, MOST
from dynaxx.layout import BlockLayout, CuSeqlens, PackedLayout
from dynaxx.layout.host import AUTOCAST_DEVICES

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def follow_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to the autocast dtype of their device; unchanged if autocast is off or the dtype is fp64.

    Arguments that are not tensors are returned unchanged, so that later checks can name them.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return q, k, v
    kind = q.device.type
    if kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    softcap: float | None = None,
    needs_grad: bool | None = None,
    values: bool = True,
) -> AttentionProblem:
    """Check that the inputs match each other, and describe them as an `AttentionProblem`.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        layout: a layout for these lengths.
        softcap: cap of the scores, or None.
        needs_grad: whether the caller will need gradients; by default, ask autograd.
        values: also check the values inside the layout; tracers cannot.

    Raises:
        TypeError: a dtype is not supported or differs from q's, or `layout` is not a BlockLayout.
        ValueError: a shape, device, layout or softcap is wrong, or block indices are out of range.
    """
    _check_tensors(q, k, v)
    check_layout(layout)
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    if k.shape != (batch, seqlen_k, kv_heads, head_dim):
        raise ValueError(
            f"`k` must be (batch = {batch}, seqlen_k, kv_heads, head_dim = {head_dim}), got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"`v` must agree with k in batch, seqlen_k and kv_heads {tuple(k.shape[:3])}, got {tuple(v.shape)}"
        )
    if not q_heads or not kv_heads or q_heads % kv_heads:
        raise ValueError(f"q_heads must be a multiple of kv_heads, both >= 1, got {q_heads} and {kv_heads}")
    if head_dim == 0 or v.shape[-1] == 0:
        raise ValueError(f"head_dim must be >= 1, got {head_dim} and {v.shape[-1]}")
    if (layout.seqlen_q, layout.seqlen_k) != (seqlen_q, seqlen_k):
        packed = isinstance(layout, PackedLayout)
        raise ValueError(
            f"`layout` must be for {seqlen_q} x {seqlen_k} tokens, got one for {layout.seqlen_q} x {layout.seqlen_k}; "
            + ("its `cu_seqlens` end there" if packed else "q, k and v are (batch, seqlen, heads, head_dim)")
        )
    if layout.layout_batch not in (1, batch) or layout.layout_heads not in (1, q_heads):
        raise ValueError(
            f"`layout` must be shared or for batch {batch} and {q_heads} q heads, "
            f"got batch {layout.layout_batch} and {layout.layout_heads} heads"
        )
    if layout.device != q.device:
        raise ValueError(f"`layout` must be on q's device {q.device}, got {layout.device}; use layout.to(q.device)")
    if softcap is not None:
        softcap = check_softcap(softcap)
    if values:
        check_values(layout)
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return AttentionProblem(
        device=q.device,
        dtype=q.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        block_size=layout.block_size,
        needs_grad=needs_grad,
        softcap=softcap,
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the type, rank, dtype and device of each tensor."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise ValueError(f"`{name}` must be a strided tensor, got {described(tensor)}")
        if tensor.ndim != 4:
            raise ValueError(
                f"`{name}` must be (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) with a packed layout,"
                f" got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(f"`{name}` must be one of {DTYPES}, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"`{name}` must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"`{name}` must be on q's device {q.device}, got {tensor.device}")


def check_layout(layout: object) -> None:
    """Raise TypeError for anything but a layout, such as a pattern or a selector."""
    if not isinstance(layout, BlockLayout):
        raise TypeError(
            f"`layout` must be a BlockLayout, got {type(layout).__name__}; make one with pattern.layout(seqlen), or "
            "with select_blocks(q, k, rule)"
        )


def check_softcap(softcap: float) -> float:
    """Return the softcap as a float.

    Raises:
        TypeError: the softcap is not a number, or a tensor that requires a gradient.
        ValueError: the softcap is not from 1e-30 to 1e30.
    """
    softcap = number("softcap", softcap)
    if not LEAST <= softcap <= MOST:
        raise ValueError(f"`softcap` must be {LEAST} to {MOST}, or None for no cap, got {softcap}")
    return softcap


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Check that there is one sink logit per q head.

    Raises:
        TypeError: `sinks` is not a floating-point tensor.
        ValueError: `sinks` has another shape or device.
    """
    q_heads = q.shape[-2]
    if not isinstance(sinks, Tensor):
        raise TypeError(f"`sinks` must be a tensor (q_heads = {q_heads},), got {type(sinks).__name__}")
    if sinks.shape != (q_heads,):
        raise ValueError(f"`sinks` must be (q_heads = {q_heads},), one logit per head, got shape {tuple(sinks.shape)}")
    if sinks.dtype not in DTYPES:
        raise TypeError(f"`sinks` must be one of {DTYPES}, got {sinks.dtype}")
    if sinks.device != q.device:
        raise ValueError(f"`sinks` must be on q's device {q.device}, got {sinks.device}")


def check_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    cu_seqlens_q: CuSeqlens | None,
    cu_seqlens_k: CuSeqlens | None,
) -> None:
    """Check packed inputs: their rank, and that the layout is packed and has the given lengths.

    Raises:
        ValueError: the rank is not 3, the layout is not packed, or its lengths differ from those given.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            raise ValueError(f"packed `{name}` must be (tokens, heads, head_dim), got shape {tuple(tensor.shape)}")
    if not isinstance(layout, PackedLayout):
        raise ValueError(
            "`layout` for packed (tokens, heads, head_dim) inputs must be packed, from `packed_layout` or "
            f"`select_packed_blocks`, got a {type(layout).__name__}"
        )
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("`cu_seqlens_k` is given without `cu_seqlens_q`; pass both")
        return
    _check_lengths("cu_seqlens_q", cu_seqlens_q, layout.cu_seqlens_q)
    _check_lengths("cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, layout.cu_seqlens_k)


def _check_lengths(name: str, given: CuSeqlens, built: Tensor) -> None:
    if (isinstance(given, Tensor) and given.ndim != 1) or len(given) != len(built):
        raise ValueError(f"`{name}` must have as many entries as the layout, {len(built)}, got {given}")
    if isinstance(given, Tensor) and (given.dtype == torch.bool or given.is_floating_point() or given.is_complex()):
        raise TypeError(f"`{name}` must be integers, got a tensor of {given.dtype}")
    if torch.compiler.is_compiling():
        return
    if not isinstance(given, Tensor):
        same = [as_integer(name, end) for end in given] == built.tolist()
    else:
        same = not looks_at_values(given.device) or torch.equal(given.to("cpu", torch.int64), built.long())
    if not same:
        raise ValueError(f"`{name}` must equal the lengths of the layout, {built.tolist()[:8]}, got {given}")


def looks_at_values(device: torch.device) -> bool:
    """Return whether checks may read tensor values: always on a CPU, on a GPU only with DYNAXX_DEBUG=1 (it waits)."""
    return device.type == "cpu" or os.environ.get("DYNAXX_DEBUG") == "1"


def check_values(layout: BlockLayout) -> None:
    """Check the values inside a layout before a launch, once per layout."""
    if looks_at_values(layout.device):
        layout.ensure_valid()
