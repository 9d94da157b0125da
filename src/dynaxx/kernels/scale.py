# SPDX-License-Identifier: Apache-2.0
"""`softmax_scale`: the factor that scores are multiplied by, and the sizes that kernels compute with in fp32."""

from __future__ import annotations

from dynaxx.arguments import number

LEAST, MOST = 1e-30, 1e30  # fp32 holds these and their products with scores; beyond them lie 0, inf and nan


def softmax_scale(scale: float | None, head_dim: int, name: str = "scale") -> float:
    """Return the softmax scale, by default head_dim ** -0.5.

    Raises:
        TypeError: the scale is not a number, or a tensor that requires a gradient.
        ValueError: head_dim is 0, or the scale is neither 0 nor from 1e-30 to 1e30 in magnitude, so results may be nan.
    """
    if head_dim < 1:
        raise ValueError(f"head_dim must be >= 1, got {head_dim}")
    if scale is None:
        return float(head_dim**-0.5)
    scale = number(name, scale)
    if scale != 0 and not LEAST <= abs(scale) <= MOST:
        raise ValueError(
            f"`{name}` must be 0 or {LEAST} to {MOST} in magnitude, or None for head_dim ** -0.5, got {scale}"
        )
    return scale
