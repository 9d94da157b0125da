# SPDX-License-Identifier: Apache-2.0
"""The bias by distance of a tile: a head's slope in closed form, or loads from its table; see `kernels.bias`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.primitives.numbers import LOG2E


class HeadBias(NamedTuple):
    """The bias of one head."""

    p_numbers: Any  # the slope, or the table
    origin: Any  # added to query - key: gives the distance, or the place in the table
    size: Any  # numbers in the table


class BiasStrides(NamedTuple):
    """Strides of a bias as one kernel argument; the stride of a table's entries is 1."""

    b: int
    h: int


def bias_arguments(bias: Tensor | None) -> dict[str, Any]:
    """Return a bias as kernel arguments; without one, they leave no trace in compiled code."""
    if bias is None:
        return {"p_bias": None, "bias_strides": None, "BIAS": "none"}
    bias = bias if bias.ndim == 2 or bias.stride(-1) == 1 else bias.contiguous()
    strides = BiasStrides(bias.stride(0), bias.stride(1))
    return {"p_bias": bias, "bias_strides": strides, "BIAS": "slopes" if bias.ndim == 2 else "table"}


@triton.jit
def head_bias(p_bias, strides, i_b, i_h, first, seqlen_q, seqlen_k, BIAS: tl.constexpr):
    """Return the bias of a head, for pairs whose query - key is `first` more than that of their offsets."""
    shift = seqlen_k - (seqlen_q if BIAS == "slopes" else 1)
    return HeadBias(
        p_numbers=p_bias + i_b * strides.b + i_h * strides.h, origin=first + shift, size=seqlen_q + seqlen_k - 1
    )


@triton.jit
def pair_bias(bias, o_q, o_k, BIAS: tl.constexpr):
    """Return the bias of pairs of offsets o_q and o_k, which are broadcast; pairs outside of the table have 0."""
    if BIAS == "slopes":
        numbers = tl.abs((bias.origin + o_q).to(tl.float32) - o_k.to(tl.float32)) * -tl.load(bias.p_numbers)
    else:
        place = (bias.origin + o_q).to(tl.int32) - o_k.to(tl.int32)
        numbers = tl.load(bias.p_numbers + place, mask=(place >= 0) & (place < bias.size), other=0.0)
    return numbers


@triton.jit
def lse_without_bias(lse, bias, o_q, o_k, EXACT: tl.constexpr, BIAS: tl.constexpr):
    """Return lse minus the bias of each pair, in the base of `weights_of`, which then needs no bias."""
    numbers = pair_bias(bias, o_q, o_k, BIAS)
    return lse - (numbers if EXACT else numbers * LOG2E)
