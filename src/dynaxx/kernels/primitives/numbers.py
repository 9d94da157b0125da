# SPDX-License-Identifier: Apache-2.0
"""Device functions for all Triton kernels: exponentials, and integers that sort like floats."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ordered_bits(x):
    """Return uint32 keys that sort like the fp32 numbers x."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def from_ordered_bits(key):
    """Return the fp32 numbers for keys from `ordered_bits`."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp_rounded(x):
    """Return exp(x) for x <= 0 with an error of about one unit in the last place; 0 below -87.

    The error of the GPU's own exp is three times as large.
    """
    near = tl.where(x < -87.0, -87.0, tl.where(x > 88.0, 88.0, x))  # keeps NaN
    n = tl.floor(near * LOG2E + 0.5)
    f = near - n * 0.693359375  # ln 2 is split in two parts, so that the first product is exact
    f = f + n * 2.12194440e-4
    p = 1.0 / 5040 + f * 0.0
    p = p * f + 1.0 / 720
    p = p * f + 1.0 / 120
    p = p * f + 1.0 / 24
    p = p * f + 1.0 / 6
    p = p * f + 0.5
    p = p * f + 1.0
    p = p * f + 1.0
    n = tl.where(near == near, n, 0.0)
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, p * power)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent; by its series near 0, where the closed form cancels."""
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    closed = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(tl.abs(x), 20.0)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -closed, closed))
