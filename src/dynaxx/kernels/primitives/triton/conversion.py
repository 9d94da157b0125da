# SPDX-License-Identifier: Apache-2.0
"""Conversion of 8-bit keys and values to fp16, which matrix instructions accept, without rounding.

The target is not bf16, because e4m3 is converted to bf16 only through fp32, one value at a time. PAIRS selects the
instructions below (sm_90); on other GPUs, Triton's own conversions give the same results.
"""

import triton
import triton.language as tl


@triton.jit
def widened(x, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """Return keys in the dtype of the product; int8 becomes fp16 by bit operations, as low bits of 1024 + 128 + x."""
    if (x.dtype == tl.int8) & PAIRS:
        y = tl.inline_asm_elementwise(
            """{ .reg .b32 x, e; xor.b32 x, $2, 0x80808080; mov.b32 e, 0x64646464;
            prmt.b32 $0, x, e, 0x4140; prmt.b32 $1, x, e, 0x4342; mov.b32 e, 0x64806480;
            sub.f16x2 $0, $0, e; sub.f16x2 $1, $1, e; }""",
            "=&r,=&r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        y = x.to(dtype)
    return y


@triton.jit
def unpaired(x, FP8: tl.constexpr):
    """Return two fp16 tiles, the first and the second 8-bit value of each 16 bits, with two values per instruction."""
    if FP8:
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b32 x; .reg .b16 l, h; prmt.b32 x, $2, 0, 0x3120; mov.b32 {l, h}, x;
            cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b32 x, e; xor.b32 x, $2, 0x80808080; mov.b32 e, 0x64646464;
            prmt.b32 $0, x, e, 0x4240; prmt.b32 $1, x, e, 0x4341; mov.b32 e, 0x64806480;
            sub.f16x2 $0, $0, e; sub.f16x2 $1, $1, e; }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even, odd


@triton.jit
def nearest(x):
    """Round numbers below 2 ** 22 to the nearest integer, ties to even; numbers that large are integers anyway."""
    return x + 12582912.0 - 12582912.0


@triton.jit
def power_below(x):
    """Return the power of two at or below each x > 0; 1 for 0."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power > 0, power, 1.0)


@triton.jit
def halved(x):
    """Return rows of x in fp16, each divided by a power of two so that it fits, and these powers."""
    x = x.to(tl.float32)
    power = power_below(tl.max(tl.abs(x), 1))
    return (x / power[:, None]).to(tl.float16), power
