# SPDX-License-Identifier: Apache-2.0
"""Attention over tokens that each query chooses: checks, choice of a backend, gradients, and decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dynaxx.derivatives import first_derivative_only
from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.sinks import sink_gradient
from dynaxx.layout.entries import has_duplicates
from dynaxx.layout.grid import BLOCK_SIZES
from dynaxx.ops.checks import check_sinks, check_softcap, looks_at_values
from dynaxx.ops.flops import count, is_counting
from dynaxx.trained.packing import Packed, packed_problem
from dynaxx.trained.registry import TOKENS
from dynaxx.trained.tokens.spans import TOKEN_BLOCKS, TokenSpans, ascending


def check_choice(
    block_indices: Tensor, before: tuple[int, ...], q_heads: int, kv_heads: int, device: torch.device
) -> None:
    """Check shape, dtype and device of block indices `before` + (select_heads, slots).

    Raises:
        ValueError, TypeError: as `selected_attention`.
    """
    if block_indices.ndim != len(before) + 2 or block_indices.shape[:-2] != before:
        raise ValueError(f"`block_indices` must be {before} + (select_heads, slots), got {tuple(block_indices.shape)}")
    heads = block_indices.shape[-2]
    if heads == 0 or q_heads % heads or (heads % kv_heads and kv_heads % heads):
        raise ValueError(
            f"select_heads of `block_indices` must divide q_heads {q_heads}, and divide kv_heads {kv_heads} or be a "
            f"multiple of it, got {heads}"
        )
    if block_indices.is_floating_point() or block_indices.is_complex() or block_indices.dtype == torch.bool:
        raise TypeError(f"`block_indices` must be integers, got {block_indices.dtype}")
    if block_indices.device != device:
        raise ValueError(f"`block_indices` must be on q's device {device}, got {block_indices.device}")


def check_tokens(block_indices: Tensor, packed: Packed, spans: TokenSpans) -> Tensor:
    """Check block indices of packed queries, and their values unless that would wait for a GPU.

    Returns:
        (tokens, select_heads, slots) int32; if values were checked, ascending with -1 at the end.

    Raises:
        ValueError, TypeError: as `selected_attention`.
    """
    before = packed.batch or (packed.q.shape[0],)
    check_choice(block_indices, before, packed.q.shape[1], packed.k.shape[1], packed.q.device)
    indices = block_indices.flatten(0, -3)
    if not looks_at_values(indices.device):
        return indices.to(torch.int32)
    if indices.dtype not in (torch.int8, torch.int16, torch.int32) and indices.numel():
        least, most = (int(x) for x in indices.aminmax())
        if least < -1 or most >= 1 << 31:
            _refuse_outside(indices, spans)
    return _ascending_values(indices.to(torch.int32).contiguous(), spans)


def _ascending_values(indices: Tensor, spans: TokenSpans) -> Tensor:
    """Check that numbers are in range and different, and return them in ascending order."""
    found = _core_check(indices, spans)
    if found is None:
        limits = spans.blocks.to(indices.device)[:, None, None]
        if ((indices < -1) | (indices >= limits)).any():
            _refuse_outside(indices, spans)
        if has_duplicates(indices):
            refuse_duplicates()
        return ascending(indices)
    outside, falls = found
    if outside >= 0:
        _refuse_outside(indices, spans)
    if falls < 0:
        return indices
    indices = ascending(indices)
    again = _core_check(indices, spans)
    if again is not None and again[1] >= 0:
        refuse_duplicates()
    return indices


def _core_check(indices: Tensor, spans: TokenSpans) -> tuple[int, int] | None:
    """Check numbers in one pass of the core; return None if the core cannot."""
    if indices.device.type != "cpu":
        return None
    from dynaxx.trained.tokens.kernels.cpu.attention import check_rows

    return check_rows(indices, spans.blocks)


def _refuse_outside(indices: Tensor, spans: TokenSpans) -> None:
    limits = spans.blocks.to(indices.device)[:, None, None]
    wrong = (indices < -1) | (indices >= limits)
    raise ValueError(
        "`block_indices` must be -1 or a block of the query's own sequence, "
        f"got {indices[wrong][0].item()} where there are {limits.expand_as(indices)[wrong][0].item()} blocks"
    )


def refuse_duplicates() -> None:
    """Raise the ValueError of a block that occurs twice."""
    raise ValueError("`block_indices` must not name a block twice for one query; set duplicates to -1")


_serving = lru_cache(maxsize=256)(TOKENS.resolve)


def attend_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    spans: TokenSpans,
    scale: float,
    backend: str = "auto",
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose a backend for checked, packed inputs, and return its out (T, Hq, E) and lse (Hq, T)."""
    name = _serving(packed_problem(q, k, v, spans.block_size, softcap), backend)
    kernels = TOKENS.kernels(name)
    plan = kernels.prepare(indices, spans, q, k, v)
    if name == "reference":
        return kernels.forward(q, k, v, plan, scale, softcap, sinks)
    joined = _is_first_part(v, k)
    backward = (kernels.latent_backward if joined else None) or kernels.backward
    pairs = chosen_pairs(indices, q, spans.block_size)
    given = (sinks, kernels.forward, backward, (plan, scale, softcap), joined, pairs)
    out: tuple[Tensor, Tensor] = ChosenAttention.apply(q, k, v.detach() if joined else v, *given)
    return out


def chosen_pairs(indices: Tensor, q: Tensor, block_size: int) -> int:
    """Return the pairs of q heads and keys in chosen blocks (T, select_heads, slots), 0 if nobody counts operations."""
    return int((indices >= 0).sum()) * block_size * q.shape[1] // indices.shape[1] if is_counting() else 0


def _is_first_part(v: Tensor, k: Tensor) -> bool:
    """Return whether v is a view of k's first columns for autograd too, so that one gradient can be the sum of both."""
    if not (k.requires_grad and v.requires_grad and torch.is_grad_enabled()) or v.shape[2] > k.shape[2]:
        return False
    base = k if k._base is None else k._base
    strides = zip(k.stride(), v.stride(), v.shape, strict=True)
    same_rows = v.shape[:-1] == k.shape[:-1] and all(a == b or size == 1 for a, b, size in strides)
    return same_rows and v._base is base and v.data_ptr() == k.data_ptr() and not v.retains_grad


class ChosenAttention(torch.autograd.Function):
    """Connect a backend's forward and backward; gradients flow through `out` and `lse`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        forward: Callable[..., tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor, ...]],
        settings: tuple[Any, ...],  # the plan, the scale, and a softcap if the backend has one
        joined: bool,  # v is the first part of k, whose gradient includes that of v
        pairs: int,
    ) -> Any:
        """Return (out, lse) of `forward`."""
        count(2 * pairs * (q.shape[-1] + v.shape[-1]))
        out, lse = forward(q, k, v, *settings, **({} if sinks is None else {"sinks": sinks}))
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.gradients, ctx.settings, ctx.joined, ctx.pairs = backward, settings, joined, pairs
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> Any:
        """Return dq, dk, dv and the gradient of the sinks."""
        q, k, v, out, lse, sinks = ctx.saved_tensors
        count(2 * ctx.pairs * (3 * q.shape[-1] + 2 * v.shape[-1]))
        dq, dk, *dv = ctx.gradients(do, dlse, SavedForward(q, k, v, out, lse), *ctx.settings)
        if ctx.joined and dv:
            dk[..., : v.shape[2]] += dv[0]
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            dsinks = sink_gradient(do[None], dlse[None], out[None], lse[None], sinks)
        return dq, dk, None if ctx.joined else dv[0], dsinks, *(None,) * 5


def check_scores(softcap: float | None, sinks: Tensor | None, q: Tensor) -> float | None:
    """Check softcap and sinks, and return the softcap."""
    if sinks is not None:
        check_sinks(sinks, q)
    return None if softcap is None else check_softcap(softcap)


def check_block_size(block_size: int) -> None:
    """Raise ValueError if the block size is not supported."""
    if block_size not in (*TOKEN_BLOCKS, *BLOCK_SIZES):
        raise ValueError(f"`block_size` must be one of {(*TOKEN_BLOCKS, *BLOCK_SIZES)}, got {block_size}")
