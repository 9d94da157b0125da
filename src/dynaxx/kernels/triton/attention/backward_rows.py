"""What the backward kernels share: per query its lse and delta, weights again from scores, the slope of a cap."""

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.gpu.primitives import LOG2E, exp_rounded
from dynaxx.kernels.triton.primitives.tiles import tanh

ROWS_MULTIPLE = 128  # so that a block of queries has all its rows


@triton.jit
def load_row_values(p_values, positions, seqlen):
    """`row_values`, as the kernel for dq leaves them; a query that is none gets lse = inf: its weights vanish."""
    inside = (positions >= 0) & (positions < seqlen)
    lse = tl.load(p_values + positions * 2, mask=inside, other=float("inf"))
    return lse, tl.load(p_values + positions * 2 + 1, mask=inside, other=0.0)


@triton.jit
def in_registers(x):
    """A tile, in fp32, as products of Hopper take their left side from registers: so that they need not read it again
    and again, and a thread has most of a row's numbers.

    It is what a product with zeros is added to: Triton keeps other tiles in shared memory. Every bit stays.
    """
    left, right = tl.zeros([x.shape[0], 16], x.dtype), tl.zeros([16, x.shape[1]], x.dtype)
    return tl.dot(left, right, x.to(tl.float32))


@triton.jit
def load_lse(p_lse, p_dlse, positions, stride_dln, seqlen):
    """lse and its gradient of a head's queries, [len(positions)]; -inf and 0 past the end."""
    inside = (positions >= 0) & (positions < seqlen)
    lse = tl.load(p_lse + positions, mask=inside, other=float("-inf"))
    return lse, tl.load(p_dlse + positions * stride_dln, mask=inside, other=0.0)


@triton.jit
def row_values(lse, dlse, wide_do, b_out, EXACT: tl.constexpr):
    """lse, of half precision in base 2, and delta = rowsum(do * out) - dlse of a head's queries, [len(lse)] fp32.

    For a query that sees nothing, and past the end, they are inf and 0: its weights and gradients vanish.
    """
    seen = lse != float("-inf")
    delta = tl.sum(wide_do * b_out.to(tl.float32), 1) - dlse.to(tl.float32)
    if not EXACT:
        lse = lse * LOG2E
    return tl.where(seen, lse, float("inf")), tl.where(seen, delta, 0.0)


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


def empty_rows(lse: Tensor) -> Tensor:
    """Uninitialized, for two numbers per query: (B, Hq, N up to the next multiple of `ROWS_MULTIPLE`, 2) fp32."""
    batch, q_heads, seqlen_q = lse.shape
    return lse.new_empty(batch, q_heads, -(-seqlen_q // ROWS_MULTIPLE) * ROWS_MULTIPLE, 2)
