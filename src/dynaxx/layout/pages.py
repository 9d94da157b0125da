# SPDX-License-Identifier: Apache-2.0
"""Pages of a cache: how large they may be, where things lie in them, and values in 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # those below 16 are meant for compressed tokens
SCALED_DTYPES = (torch.float8_e4m3fn, torch.int8)  # stored with a scale


class PageStrides(NamedTuple):
    """Where things lie, in elements: token t of page p, kv head h of batch entry b starts at b * batch + p * page + ..

    p is the physical page where the cache is paged (batch is 0 then), the logical one where it is contiguous.
    """

    batch: int
    page: int
    token: int
    head: int


def page_strides(x: Tensor) -> PageStrides:
    """Of a (num_pages, kv_heads, n) tensor that has one row per page and head, or with batch before."""
    *batch, page, head, _ = x.stride()
    return PageStrides(batch[0] if batch else 0, page, 0, head)


@typed
def quantize_pages(x: Tensor, dtype: torch.dtype, page_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Store keys or values in 8 bits, one scale per page and kv head, so that the largest of them is exact.

    Args:
        x: (num_pages, page_size, kv_heads, head_dim) of floats; contiguous (batch, seqlen, ...) with `page_size`.
        dtype: torch.float8_e4m3fn or torch.int8.
        page_size: of a contiguous cache, one of PAGE_SIZES; None: pages as they lie.

    Returns:
        (stored, scale): x's shape in `dtype`, and fp32 (num_pages, kv_heads) or (batch, pages, kv_heads).

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: no floats of four dimensions, or another page size.
    """
    if x.ndim != 4 or x.shape[3] == 0 or not x.is_floating_point():
        raise ValueError(
            f"`x` must be (num_pages, page_size, kv_heads, head_dim) of floats, or contiguous (batch, seqlen, ...), "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if dtype not in SCALED_DTYPES:
        raise TypeError(f"`dtype` must be one of {SCALED_DTYPES}, got {dtype}")
    if page_size is not None and not (isinstance(page_size, int) and page_size in PAGE_SIZES):
        raise ValueError(f"`page_size` must be one of {PAGE_SIZES}, or None for pages as they lie, got {page_size!r}")
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
