# SPDX-License-Identifier: Apache-2.0
"""Properties of cache pages: sizes, strides, and quantization to 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, typed

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # sizes below 16 are meant for compressed tokens
SCALED_DTYPES = (torch.float8_e4m3fn, torch.int8)  # dtypes that are stored with a scale


class PageStrides(NamedTuple):
    """Strides of a cache in elements: token t of kv head h starts at b * batch + p * page + t * token + h * head.

    For a paged cache p is the physical page and `batch` is 0; for a contiguous cache p is the logical page of batch
    entry b.
    """

    batch: int
    page: int
    token: int
    head: int


def page_strides(x: Tensor) -> PageStrides:
    """Return the strides of a tensor with one row per page and head: ([batch,] pages, kv_heads, n)."""
    *batch, page, head, _ = x.stride()
    return PageStrides(batch[0] if batch else 0, page, 0, head)


@typed
def quantize_pages(x: Tensor, dtype: torch.dtype, page_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize keys or values to 8 bits with one scale per page and kv head.

    The scale maps the largest magnitude of a page and head to the largest value of `dtype`.

    Args:
        x: (num_pages, page_size, kv_heads, head_dim) of floats; contiguous (batch, seqlen, kv_heads, head_dim) with
            `page_size`.
        dtype: torch.float8_e4m3fn or torch.int8.
        page_size: page size of a contiguous cache, one of PAGE_SIZES; None if `x` is paged.

    Returns:
        (stored, scale): `x` in `dtype`, and fp32 scales (num_pages, kv_heads) or (batch, pages, kv_heads).

    Raises:
        TypeError: `x` is not a tensor, or `dtype` is not supported.
        ValueError: `x` is not a four-dimensional float tensor, or `page_size` is not supported.
    """
    if x.ndim != 4 or x.shape[3] == 0 or not x.is_floating_point():
        raise ValueError(
            f"`x` must be (num_pages, page_size, kv_heads, head_dim) of floats, or contiguous (batch, seqlen, ...), "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if dtype not in SCALED_DTYPES:
        raise TypeError(f"`dtype` must be one of {SCALED_DTYPES}, got {dtype}")
    if page_size is not None and as_integer("page_size", page_size) not in PAGE_SIZES:
        raise ValueError(f"`page_size` must be one of {PAGE_SIZES}, or None if `x` is paged, got {page_size!r}")
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    if page_size is None:
        scale = (x.float().abs().amax((1, 3)) / largest).clamp(min=torch.finfo(torch.float32).tiny)
        per_token = scale[:, None, :, None]
    else:
        pages = -(-x.shape[1] // page_size)
        padded = torch.nn.functional.pad(x.float().abs().amax(3), (0, 0, 0, pages * page_size - x.shape[1]))
        scale = padded.unflatten(1, (pages, page_size)).amax(2) / largest
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        per_token = scale.repeat_interleave(page_size, 1)[:, : x.shape[1], :, None]
    stored = x.float() / per_token
    stored = stored.round() if dtype == torch.int8 else stored
    return stored.clamp(-largest, largest).to(dtype), scale
