# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the backward kernels share: per query its lse and delta, weights again from scores, the slope of a cap."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.config import padded
from dynaxx.kernels.triton.launch import strides
from dynaxx.kernels.triton.light import Launch, light_launch
from dynaxx.kernels.triton.primitives import LOG2E, exp_rounded, load_rows, tanh
from dynaxx.layout import BlockLayout

ROWS_MULTIPLE = 128  # so that a block of queries has all its rows
BLOCK_ROWS = 64


@triton.jit
def load_row_values(p_lse, p_delta, positions, seqlen):
    """lse and delta, as `start_rows` leaves them; a query that is none gets lse = inf, so that its weights vanish."""
    inside = (positions >= 0) & (positions < seqlen)
    lse = tl.load(p_lse + positions, mask=inside, other=float("inf"))
    return lse, tl.load(p_delta + positions, mask=inside, other=0.0)


@triton.jit
def weights_of(scores, lse, scale, EXACT: tl.constexpr):
    """exp(scores * scale - lse); in base 2, as lse is, unless the rounding of both terms there would show."""
    weights = exp_rounded(scores * scale - lse) if EXACT else tl.exp2(scores * (scale * LOG2E) - lse)
    return weights


@triton.jit
def cap_scores(scores, cap, CAPPED: tl.constexpr):
    """Capped scores, and what their gradients are multiplied with."""
    slope = 1.0
    if CAPPED:
        bent = tanh(scores / cap)
        scores, slope = cap * bent, 1.0 - bent * bent
    return scores, slope


@light_launch
@triton.jit(do_not_specialize=["seqlen_q", "padded_q", "q_heads", "stride_dlb", "stride_dlh", "stride_dln"])
def _sparse_attention_bwd_rows_kernel(
    p_do,
    p_dlse,
    p_out,
    p_lse,
    p_row_lse,  # (B, Hq, padded_q) contiguous, fp32
    p_delta,
    seqlen_q,
    padded_q,
    q_heads,
    stride_dob,
    stride_don,
    stride_doh,
    stride_dlb,
    stride_dlh,
    stride_dln,
    stride_ob,
    stride_on,
    stride_oh,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXACT: tl.constexpr,
):
    tiles = padded_q // BLOCK_M
    i_tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = head // q_heads, head % q_heads
    pos_q = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pos_q < seqlen_q
    b_do = load_rows(p_do + i_b * stride_dob + i_h * stride_doh, 0, pos_q, stride_don, seqlen_q, E, BLOCK_E)
    b_out = load_rows(p_out + i_b * stride_ob + i_h * stride_oh, 0, pos_q, stride_on, seqlen_q, E, BLOCK_E)
    p_row = p_dlse + i_b * stride_dlb + i_h * stride_dlh + pos_q.to(tl.int64) * stride_dln
    dlse = tl.load(p_row, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(p_lse + head * seqlen_q + pos_q, mask=inside, other=float("-inf"))
    seen = lse != float("-inf")
    delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1) - dlse
    tl.store(p_delta + head * padded_q + pos_q, tl.where(seen, delta, 0.0))
    row_lse = lse if EXACT else lse * LOG2E
    tl.store(p_row_lse + head * padded_q + pos_q, tl.where(seen, row_lse, float("inf")))


def empty_rows(lse: Tensor) -> Tensor:
    """Uninitialized, for a number per query: (B, Hq, N up to the next multiple of `ROWS_MULTIPLE`) fp32."""
    batch, q_heads, seqlen_q = lse.shape
    return lse.new_empty(batch, q_heads, -(-seqlen_q // ROWS_MULTIPLE) * ROWS_MULTIPLE)


def start_rows(
    layout: BlockLayout, do: Tensor, dlse: Tensor, out: Tensor, lse: Tensor, row_lse: Tensor, delta: Tensor
) -> Launch | None:
    """Fill `empty_rows`: lse in base 2, of fp32 inputs in base e, and delta = rowsum(do * out) - dlse.

    For a query that sees nothing, and past the end, they are inf and 0: its weights and gradients vanish.
    """
    batch, seqlen_q, q_heads = out.shape[:3]
    padded_q = delta.shape[2]
    started: Launch | None = _sparse_attention_bwd_rows_kernel[(padded_q // BLOCK_ROWS * batch * q_heads,)](
        do,
        dlse,
        out,
        lse,
        row_lse,
        delta,
        seqlen_q=seqlen_q,
        padded_q=padded_q,
        q_heads=q_heads,
        **strides("do", do),
        stride_dlb=dlse.stride(0),
        stride_dlh=dlse.stride(1),
        stride_dln=dlse.stride(2),
        **strides("o", out),
        E=do.shape[3],
        BLOCK_E=padded(do.shape[3]),
        BLOCK_M=BLOCK_ROWS,
        EXACT=out.dtype == torch.float32,
    )
    return started
