# SPDX-License-Identifier: Apache-2.0
"""`PagedCache`: keys and values in pages, as a decoding engine stores them, or in one contiguous tensor."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, described, typed
from dynaxx.layout.form import Form, form_of
from dynaxx.layout.paging.exact_tokens import SINKS, WINDOW, ExactTokens
from dynaxx.layout.paging.in_place import divided_pages, divided_table
from dynaxx.layout.paging.pages import PAGE_SIZES, SCALED_DTYPES, PageStrides, page_strides, quantize_pages
from dynaxx.layout.paging.summaries import PageSummaries
from dynaxx.lazy import lazy

CACHE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, *SCALED_DTYPES)


@runtime_checkable
class CompressedTokens(Protocol):
    """Tokens that stand for several keys, stored next to a cache; see `trained.nsa.compressed_pages`."""

    @property
    def k(self) -> Tensor:
        """Return the keys, page by page or sequence by sequence as in the cache."""

    @property
    def v(self) -> Tensor:
        """Return the values."""

    @property
    def sizes(self) -> Hashable:
        """Return the sizes that the compressed tokens were made with."""

    def check(self, cache: PagedCache) -> None:
        """Raise ValueError if these are not tokens of the cache."""


@typed
@dataclass(frozen=True, repr=False)
class PagedCache:
    """Keys and values in pages, and the current length of each sequence. Its tensors are views of the engine's memory.

    Queries are aligned to the last key of their sequence. Keys before `leftpad_k` and keys from `seqused_k` on are
    hidden, whatever their memory holds. A logical page whose table entry is -1 holds nothing.

    Args:
        k: (num_pages, page_size, kv_heads, head_dim) with a dense last dimension, dtype in CACHE_DTYPES; contiguous:
            (batch, seqlen_k, kv_heads, head_dim).
        v: like `k`, with head_dim_v and k's dtype.
        seqused_k: (batch,) int32, keys in use, including padding.
        page_table: (batch, max_pages) int32, physical page of each logical page; None: contiguous.
        page_size: tokens per page, one of PAGE_SIZES; taken from `k` if paged, required if contiguous.
        leftpad_k: (batch,) int32, hidden keys at the start; None: none.
        k_scale, v_scale: fp32 scales of 8-bit caches, key = stored * scale. Shape (), (kv_heads,) or, with one scale
            per page, (num_pages, kv_heads); contiguous (batch, pages, kv_heads).
        summaries: required where decoding selects pages; `summarize_pages` computes them.
        exact: for 8-bit caches, tokens that attention reads from here instead of the cache.
        compressed: required by `nsa_decode`; `compress_pages` computes them.

    Raises:
        TypeError, ValueError: the tensors do not match each other. Values are checked where they are used.
    """

    k: Tensor
    v: Tensor
    seqused_k: Tensor
    page_table: Tensor | None = None
    page_size: int = 0
    leftpad_k: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    summaries: PageSummaries | None = None
    exact: ExactTokens | None = None
    compressed: CompressedTokens | None = None

    def __post_init__(self) -> None:
        """Take `page_size` from `k` if it is not given, and check tensors of a new form."""
        if self.page_table is not None and self.page_size == 0 and self.k.ndim == 4:
            object.__setattr__(self, "page_size", self.k.shape[1])
        if type(self.page_size) is not int:
            object.__setattr__(self, "page_size", as_integer("page_size", self.page_size))
        if torch.compiler.is_compiling():
            return  # the op that takes these tensors builds a cache of its own, and checks it
        if not self.form.checked:
            self._check()
            self.form.checked = True

    def _check(self) -> None:
        """Check shapes, strides, dtypes and devices; runs once per `Form`."""
        if self.k.ndim != 4 or self.v.ndim != 4 or self.k.shape[:3] != self.v.shape[:3]:
            raise ValueError(
                "`k` and `v` must be (num_pages, page_size, kv_heads, head_dim), or contiguous "
                "(batch, seqlen, kv_heads, head_dim), and may differ in head_dim only, "
                f"got {tuple(self.k.shape)} and {tuple(self.v.shape)}"
            )
        if self.k.dtype not in CACHE_DTYPES or self.v.dtype != self.k.dtype:
            raise TypeError(f"`k` and `v` must both be one of {CACHE_DTYPES}, got {self.k.dtype} and {self.v.dtype}")
        for name, x in (("k", self.k), ("v", self.v)):
            if x.layout != torch.strided:
                raise TypeError(f"`{name}` must be a strided tensor, got {described(x)}")
            if x.shape[3] > 1 and x.stride(3) != 1:
                raise ValueError(f"`{name}` must have a dense last dimension, got stride {x.stride(3)}")
        self._check_table()
        for name, each in (("seqused_k", self.seqused_k), ("leftpad_k", self.leftpad_k)):
            if each is not None and (each.shape != (self.batch,) or each.dtype != torch.int32):
                raise ValueError(
                    f"`{name}` must be (batch = {self.batch},) int32, got {each.dtype} {tuple(each.shape)}"
                )
        self._check_scales()
        for name in ("v", "seqused_k", "page_table", "leftpad_k", "k_scale", "v_scale"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.device:
                raise ValueError(f"`{name}` must be on k's device {self.device}, got {tensor.device}")
        if self.summaries is not None and not self.summaries.fits(self):
            raise ValueError(
                f"`summaries` must match this cache, got {tuple(self.summaries.low.shape)} on "
                f"{self.summaries.low.device} for k {tuple(self.k.shape)}; make them with summarize_pages(cache)"
            )
        if self.exact is not None:
            self._check_exact(self.exact)
        if self.compressed is not None:
            self.compressed.check(self)

    @classmethod
    @typed
    def contiguous(
        cls,
        k: Tensor,
        v: Tensor,
        *,
        page_size: int = 64,
        seqused_k: Tensor | None = None,
        leftpad_k: Tensor | None = None,
    ) -> PagedCache:
        """Wrap contiguous keys and values as a cache without a page table.

        Args:
            k: (batch, seqlen_k, kv_heads, head_dim).
            v: (batch, seqlen_k, kv_heads, head_dim_v).
            page_size: tokens that are selected together, one of PAGE_SIZES.
            seqused_k: (batch,) int32, keys in use, including padding; all keys by default.
            leftpad_k: (batch,) int32, hidden keys at the start; None: none.
        """
        if k.ndim != 4:
            raise ValueError(f"`k` must be (batch, seqlen_k, kv_heads, head_dim), got shape {tuple(k.shape)}")
        if seqused_k is None:
            seqused_k = torch.full((k.shape[0],), k.shape[1], dtype=torch.int32, device=k.device)
        return cls(k, v, seqused_k, page_size=page_size, leftpad_k=leftpad_k)

    @classmethod
    @typed
    def quantized(
        cls,
        k: Tensor,
        v: Tensor,
        dtype: torch.dtype = torch.float8_e4m3fn,
        *,
        page_size: int = 64,
        seqused_k: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        sinks: int = SINKS,
        window: int = WINDOW,
    ) -> PagedCache:
        """Quantize keys and values to a contiguous 8-bit cache, with scales per page and head and exact end tokens.

        Args:
            k: (batch, seqlen_k, kv_heads, head_dim) of floats.
            v: (batch, seqlen_k, kv_heads, head_dim_v) of floats.
            dtype: torch.float8_e4m3fn or torch.int8.
            page_size: tokens that are selected together, one of PAGE_SIZES.
            seqused_k: (batch,) int32, keys in use, including padding; all keys by default.
            leftpad_k: (batch,) int32, hidden keys at the start; None: none.
            sinks: number of first tokens of each sequence that stay in k's dtype; see `ExactTokens`.
            window: number of last tokens of each sequence that stay in k's dtype.
        """
        whole = cls.contiguous(k, v, page_size=page_size, seqused_k=seqused_k, leftpad_k=leftpad_k)
        exact = ExactTokens.of(k, v, whole.seqused_k, leftpad_k, sinks=sinks, window=window)
        (k, k_scale), (v, v_scale) = (quantize_pages(x, dtype, page_size) for x in (k, v))
        return replace(whole, k=k, v=v, k_scale=k_scale, v_scale=v_scale, exact=exact)

    @typed
    def with_page_size(self, page_size: int) -> PagedCache:
        """Return the same keys and values in smaller pages, so that decoding chooses among more and smaller pages.

        A paged cache is viewed in place, whatever pages its engine has; summaries are made for the result.

        Args:
            page_size: one of PAGE_SIZES; for a paged cache a divisor of its own.

        Raises:
            ValueError: the pages cannot be divided so, scales are those of pages, or tokens beside the cache are.
        """
        if page_size == self.page_size:
            return self
        if self.compressed is not None or any(s is not None and s.ndim > 1 for s in (self.k_scale, self.v_scale)):
            raise ValueError(
                "a cache with compressed tokens or a scale per page keeps its pages; build it with smaller ones"
            )
        if self.page_table is None:
            return replace(self, page_size=page_size, summaries=None)
        (k, step), (v, of_values) = divided_pages(self.k, page_size), divided_pages(self.v, page_size)
        if step != of_values:
            raise ValueError("`k` and `v` must lie in memory in the same order of pages, heads and tokens")
        table = divided_table(self.page_table, self.k, step, page_size)
        return replace(self, k=k, v=v, page_table=table, page_size=page_size, summaries=None)

    @lazy
    def kernel_inputs(self) -> tuple[Tensor, ...]:
        """Return every tensor of the cache once, in the order of the fields."""
        return tuple(x for x in self._places if x is not None)

    @lazy
    def form(self) -> Form:
        """Return the cache's `Form`, equal for caches that agree in shapes, strides, dtypes, devices and settings."""
        bound = None if self.summaries is None else self.summaries.bound
        sinks = None if self.exact is None else self.exact.sinks
        sizes = None if self.compressed is None else self.compressed.sizes
        return form_of(self._places, self.page_size, bound, sinks, sizes)

    @property
    def _places(self) -> tuple[Tensor | None, ...]:
        summaries, exact, compressed = self.summaries, self.exact, self.compressed
        high = None if summaries is None or summaries.high is summaries.low else summaries.high
        return (
            self.k,
            self.v,
            self.seqused_k,
            self.page_table,
            self.leftpad_k,
            self.k_scale,
            self.v_scale,
            *((None, high, None) if summaries is None else (summaries.low, high, summaries.scale)),
            *((None, None) if exact is None else (exact.k, exact.v)),
            *((None, None) if compressed is None else (compressed.k, compressed.v)),
        )

    def __repr__(self) -> str:
        """Return the sizes, without the values, which may lie on a GPU."""
        parts = [name for name in ("leftpad_k", "summaries", "exact", "compressed") if getattr(self, name) is not None]
        return (
            f"PagedCache(batch={self.batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"head_dim_v={self.head_dim_v}, page_size={self.page_size}, max_pages={self.max_pages}, "
            f"{'paged' if self.is_paged else 'contiguous'}, dtype={self.k.dtype}, device={self.device}"
            + "".join(f", {name}" for name in parts)
            + ")"
        )

    @property
    def is_paged(self) -> bool:
        """Return whether a page table places the pages."""
        return self.page_table is not None

    @property
    def batch(self) -> int:
        """Return the number of sequences."""
        return (self.k if self.page_table is None else self.page_table).shape[0]

    @property
    def max_pages(self) -> int:
        """Largest number of logical pages per sequence."""
        return -(-self.k.shape[1] // self.page_size) if self.page_table is None else self.page_table.shape[1]

    @property
    def max_keys(self) -> int:
        """Largest number of keys per sequence."""
        return self.k.shape[1] if self.page_table is None else self.page_table.shape[1] * self.page_size

    @property
    def kv_heads(self) -> int:
        """Return the number of kv heads."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Return the head_dim of keys."""
        return self.k.shape[3]

    @property
    def head_dim_v(self) -> int:
        """Return the head_dim of values."""
        return self.v.shape[3]

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.k.device

    def strides(self, x: Tensor) -> PageStrides:
        """Return the strides of `k` or `v`."""
        first, token, head, _ = x.stride()
        return (
            PageStrides(0, first, token, head)
            if self.is_paged
            else PageStrides(first, token * self.page_size, token, head)
        )

    def scale_strides(self, scale: Tensor) -> PageStrides:
        """Return the strides of `k_scale` or `v_scale`."""
        if scale.ndim <= 1:
            return PageStrides(0, 0, 0, scale.stride(0) if scale.ndim else 0)
        return page_strides(scale[..., None])

    def _check_table(self) -> None:
        if self.page_table is None:
            if self.page_size not in PAGE_SIZES:
                raise ValueError(f"`page_size` of a contiguous cache must be one of {PAGE_SIZES}, got {self.page_size}")
            return
        if self.page_table.ndim != 2 or self.page_table.dtype != torch.int32:
            raise ValueError(
                f"`page_table` must be (batch, max_pages) int32, got {self.page_table.dtype} "
                f"{tuple(self.page_table.shape)}"
            )
        if self.page_size != self.k.shape[1]:
            raise ValueError(f"`page_size` must be k's {self.k.shape[1]} or left out, got {self.page_size}")
        if self.k.shape[1] not in PAGE_SIZES:
            raise ValueError(f"pages must hold one of {PAGE_SIZES} tokens, got {self.k.shape[1]}")

    def _check_scales(self) -> None:
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if (scale is None) != (self.k.dtype not in SCALED_DTYPES):
                raise ValueError(
                    f"`{name}` must be given for fp8 and int8 caches and for no others, got a cache of {self.k.dtype}"
                )
            lead = (self.k.shape[0],) if self.is_paged else (self.batch, self.max_pages)
            allowed = [(), (self.kv_heads,), (*lead, self.kv_heads)]
            if scale is not None and (tuple(scale.shape) not in allowed or scale.dtype != torch.float32):
                raise ValueError(
                    f"`{name}` must be fp32 with one of the shapes {allowed}, got {scale.dtype} {tuple(scale.shape)}"
                )

    def _check_exact(self, exact: ExactTokens) -> None:
        if self.k.dtype not in SCALED_DTYPES:
            raise ValueError(f"`exact` is only for fp8 and int8 caches, got a cache of {self.k.dtype}")
        own, wanted = (*exact.k.shape, exact.v.shape[3]), (self.batch, self.kv_heads, self.head_dim, self.head_dim_v)
        if (own[0], *own[2:]) != wanted or exact.k.device != self.device:
            raise ValueError(
                f"`exact` must match this cache: (batch, kv_heads, head_dim, head_dim_v) = {wanted} on {self.device}, "
                f"got {(own[0], *own[2:])} on {exact.k.device}"
            )
