# SPDX-License-Identifier: Apache-2.0
"""Softcap on Hopper: a score s becomes c tanh(s / c). Without a cap, the rate is None and none of this is compiled.

With a cap, t = tanh(q . k * rate) replaces q . k, and c replaces the scale. Masks, maxima and exponentials do not
change. The relative error of the GPU's tanh is at most 1.1e-5 (over all floats, on an H200; PTX promises 2**-11), a
fortieth of the rounding of a score in fp16. An exponential and a reciprocal would have an absolute error of 2e-7, but
lose digits for scores far below the cap, and take 10 to 20 % more time for the forward; a quotient of polynomials, 27
to 73 %.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def capped(scores, cap_rate):
    """Return tanh(scores * cap_rate), or `scores` unchanged without a rate."""
    if cap_rate is None:
        return scores
    else:
        x = scores * cap_rate
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sloped(weights, scores, cap_rate):
    """Return `weights` times 1 - t ** 2, the derivative of the cap, where t comes from `capped`; unchanged without."""
    if cap_rate is None:
        return weights
    else:
        return weights * (1 - scores * scores)
