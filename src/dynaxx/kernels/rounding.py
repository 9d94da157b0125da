# SPDX-License-Identifier: Apache-2.0
"""Rows of numbers rounded to 8 bits with a scale per row, defined."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_FP8 = torch.finfo(torch.float8_e4m3fn).max
LEAST = torch.finfo(torch.float32).tiny


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers from -127 to 127 in fp32, and the scale of each row in fp32."""
    x = x.float()
    scale = x.abs().amax(-1).clamp(min=LEAST) / 127
    return (x / scale[..., None]).round(), scale


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 numbers and the scale of each row, by which its largest number becomes the largest of the format."""
    x = x.float()
    scale = x.abs().amax(-1).clamp(min=LEAST * MAX_FP8) / MAX_FP8
    return (x / scale[..., None]).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn), scale
