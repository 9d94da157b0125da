"""Softcap on Hopper: a score s becomes c tanh(s / c). Without one the rate is None, and nothing of this is compiled.

With one, t = tanh(q . k * rate) stands where q . k did, and c where the scale did: masks, maxima and exponentials are
the same. The GPU's own tanh is 1.1e-5 off, relative, at most (all floats, one H200; PTX promises 2**-11): a fortieth of
what fp16 rounds off a score. By way of an exponential and a reciprocal it is 2e-7 off, absolute, but scores far below
the cap lose digits, and the forward took 10 to 20 % more time; as a quotient of polynomials 27 to 73 %.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def capped(scores, cap_rate):
    """tanh(scores * cap_rate); `scores` themselves without a rate."""
    if cap_rate is None:
        return scores
    else:
        x = scores * cap_rate
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sloped(weights, scores, cap_rate):
    """`weights` times 1 - t ** 2, the slope of the cap where `capped` gave t; themselves without a rate."""
    if cap_rate is None:
        return weights
    else:
        return weights * (1 - scores * scores)
