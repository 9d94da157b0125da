# SPDX-License-Identifier: Apache-2.0
"""`softmax_scale`: the factor that scores are multiplied by."""

from __future__ import annotations

from dynaxx.arguments import number


def softmax_scale(scale: float | None, head_dim: int, name: str = "scale") -> float:
    """Return the softmax scale, by default head_dim ** -0.5.

    Raises:
        TypeError: the scale is not a number, or a tensor that requires a gradient.
        ValueError: the scale is nan or infinite, which would make every result nan.
    """
    if scale is None:
        return float(head_dim**-0.5)
    scale = number(name, scale)
    if not -float("inf") < scale < float("inf"):
        raise ValueError(f"`{name}` must be finite, or None for head_dim ** -0.5, got {scale}")
    return scale
