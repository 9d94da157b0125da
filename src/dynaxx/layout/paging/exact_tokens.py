# SPDX-License-Identifier: Apache-2.0
"""`ExactTokens`: the first and last tokens of each sequence of an 8-bit cache, stored unquantized beside the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, typed

EXACT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST = 1024  # upper bound for `sinks` and for `window`
SINKS, WINDOW = 4, 28  # default numbers of first and last tokens; together they fill one tile of a matrix unit


@typed
@dataclass(frozen=True)
class ExactTokens:
    """The first and the last tokens of each sequence, unquantized.

    These tokens receive the most attention, so most of the error of an 8-bit cache would come from rounding them. Every
    query sees them, whichever pages are selected. Attention reads them from here and skips their copies in the cache.
    Token t of a sequence lies in slot t - leftpad_k if that is below `sinks`, else in slot sinks + t % window.

    Args:
        k: (batch, sinks + window, kv_heads, head_dim), contiguous, fp16, bf16 or fp32.
        v: (batch, sinks + window, kv_heads, head_dim_v), contiguous, k's dtype.
        sinks: number of slots for first tokens.

    Raises:
        TypeError, ValueError: the tensors do not match each other.
    """

    k: Tensor
    v: Tensor
    sinks: int = SINKS

    def __post_init__(self) -> None:
        """Check the shapes, and that both sinks and window have tokens."""
        if self.k.ndim != 4 or self.v.ndim != 4 or self.k.shape[:3] != self.v.shape[:3]:
            raise ValueError(
                "`k` and `v` must be (batch, sinks + window, kv_heads, head_dim) and may differ in head_dim only, "
                f"got {tuple(self.k.shape)} and {tuple(self.v.shape)}"
            )
        object.__setattr__(self, "sinks", as_integer("sinks", self.sinks))
        if not 0 <= self.sinks < self.k.shape[1]:
            raise ValueError(f"`sinks` must be >= 0 and less than the {self.k.shape[1]} slots, got {self.sinks}")
        if self.k.dtype not in EXACT_DTYPES or self.v.dtype != self.k.dtype:
            raise TypeError(f"`k` and `v` must both be one of {EXACT_DTYPES}, got {self.k.dtype} and {self.v.dtype}")
        if not (self.k.is_contiguous() and self.v.is_contiguous()):
            raise ValueError("`k` and `v` must be contiguous")

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        seqused_k: Tensor,
        leftpad_k: Tensor | None = None,
        *,
        sinks: int = SINKS,
        window: int = WINDOW,
    ) -> ExactTokens:
        """Copy the first and last tokens out of a cache in full precision.

        Args:
            k: (batch, seqlen_k, kv_heads, head_dim), a contiguous cache.
            v: (batch, seqlen_k, kv_heads, head_dim_v).
            seqused_k: (batch,) int32, keys in use, including padding.
            leftpad_k: (batch,) int32, hidden keys at the start; None: none.
            sinks: number of first tokens to store.
            window: number of last tokens to store.
        """
        sinks, window = as_integer("sinks", sinks), as_integer("window", window)
        if not (0 <= sinks <= MOST and 1 <= window <= MOST):
            raise ValueError(f"`sinks` must be 0 to {MOST} and `window` 1 to {MOST} tokens, got {sinks} and {window}")
        empty = lambda x: x.new_zeros(x.shape[0], sinks + window, *x.shape[2:])
        tokens = cls(empty(k), empty(v), sinks)
        places = tokens.positions(seqused_k, leftpad_k)
        for own, x in ((tokens.k, k), (tokens.v, v)):
            _fill(own, x, places)
        return tokens

    @property
    def window(self) -> int:
        """Number of slots for last tokens."""
        return self.k.shape[1] - self.sinks

    def positions(self, seqused_k: Tensor, leftpad_k: Tensor | None = None) -> Tensor:
        """Return the token of its sequence that each slot holds, (batch, sinks + window) int64; -1 if it holds none."""
        slot = torch.arange(self.k.shape[1], device=seqused_k.device)
        used, first = seqused_k.long()[:, None], _first(seqused_k, leftpad_k)[:, None]
        last = used - 1 - (used - 1 - (slot - self.sinks)) % self.window
        position = torch.where(slot < self.sinks, first + slot, last)
        there = (position < used) & (position >= torch.where(slot < self.sinks, first, first + self.sinks))
        return torch.where(there, position, -1)

    def write(self, k: Tensor, v: Tensor, seqused_k: Tensor, leftpad_k: Tensor | None = None) -> None:
        """Store the newest tokens of each sequence, in place. Does not synchronize with the device.

        Args:
            k: (batch, new_tokens, kv_heads, head_dim).
            v: (batch, new_tokens, kv_heads, head_dim_v).
            seqused_k: (batch,) int32, keys in use including the new tokens.
            leftpad_k: (batch,) int32, hidden keys at the start; None: none.
        """
        places = self.positions(seqused_k, leftpad_k)
        places = places - (seqused_k.long()[:, None] - k.shape[1])
        for own, x in ((self.k, k), (self.v, v)):
            _fill(own, x, places)

    def bounds(self, seqused_k: Tensor, leftpad_k: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the token range that attention reads from the cache: first and last + 1, each (batch,) int32."""
        start = torch.minimum(_first(seqused_k, leftpad_k) + self.sinks, seqused_k)
        return start.int(), torch.maximum(start, seqused_k - self.window).int()


def _first(seqused_k: Tensor, leftpad_k: Tensor | None) -> Tensor:
    return torch.zeros_like(seqused_k, dtype=torch.int64) if leftpad_k is None else leftpad_k.long()


def _fill(own: Tensor, x: Tensor, places: Tensor) -> None:
    """Set own[b, slot] = x[b, places[b, slot]] wherever places[b, slot] is an index of x."""
    if x.shape[1] == 0:
        return
    known = ((places >= 0) & (places < x.shape[1]))[..., None, None]
    at = places.clamp(0, x.shape[1] - 1)[..., None, None].expand(-1, -1, *x.shape[2:])
    own.copy_(torch.where(known, x.gather(1, at).to(own.dtype), own))
