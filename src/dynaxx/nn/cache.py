"""`NativeCache`: the keys of a batch of sequences of one length, and what is compressed of them so far."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dynaxx.kernels.reference.native import compression_windows
from dynaxx.layout.native import NativeSizes, native_spans

Compress = Callable[[Tensor], Tensor]  # (windows, cmp_block, heads, dim) -> (windows, heads, dim)


class NativeCache:
    """Contiguous keys and values of one layer, grown by doubling; a window is compressed once, when its last key comes.

    Args:
        capacity: tokens to make room for at first.
    """

    def __init__(self, capacity: int = 256) -> None:
        if capacity < 1:
            raise ValueError(f"`capacity` must be >= 1 token, got {capacity}")
        self.capacity, self.length, self.length_cmp = capacity, 0, 0
        self._k, self._v, self._k_cmp, self._v_cmp = (torch.empty(0) for _ in range(4))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add (batch, tokens, kv_heads, dim) keys and values; return all of them, as views.

        Raises:
            ValueError: another batch or number of heads than before, or tensors that need gradients.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("a cache serves inference: call the model under torch.no_grad() or inference_mode()")
        if self.length and k.shape[0] != self._k.shape[0]:
            raise ValueError(f"`k` must be of the cache's batch {self._k.shape[0]}, got {k.shape[0]}")
        end = self.length + k.shape[1]
        self._k, self._v = (_write(kept, self.length, x, self.capacity) for kept, x in ((self._k, k), (self._v, v)))
        self.length = end
        return self._k[:, :end], self._v[:, :end]

    def compress(self, sizes: NativeSizes, compress_k: Compress, compress_v: Compress) -> tuple[Tensor, Tensor]:
        """Compress the windows that are whole by now; return all compressed keys and values, as views."""
        done, end = self.length_cmp, sizes.compressed(self.length)
        if end > done or not self._k_cmp.ndim > 1:
            new = slice(done * sizes.cmp_stride, self.length)
            room = max(1, sizes.compressed(self.capacity))
            k, v = (compress_batch(x[:, new], sizes, f) for x, f in ((self._k, compress_k), (self._v, compress_v)))
            self._k_cmp, self._v_cmp = (_write(kept, done, x, room) for kept, x in ((self._k_cmp, k), (self._v_cmp, v)))
            self.length_cmp = end
        return self._k_cmp[:, :end], self._v_cmp[:, :end]


def compress_batch(x: Tensor, sizes: NativeSizes, compress: Compress) -> Tensor:
    """(batch, tokens, heads, dim) -> (batch, compressed tokens, heads, dim). Differentiable."""
    batch, tokens = x.shape[:2]
    ends = tuple(range(0, batch * tokens + 1, tokens)) if tokens else (0,) * (batch + 1)
    spans = native_spans(sizes, ends, device=x.device)
    return compress(compression_windows(x.flatten(0, 1), spans)).unflatten(0, (batch, sizes.compressed(tokens)))


def _write(kept: Tensor, begin: int, x: Tensor, room: int) -> Tensor:
    """`kept`, or a larger copy of it, with `x` from `begin` on along dim 1."""
    end = begin + x.shape[1]
    if kept.ndim == 1 or end > kept.shape[1]:
        grown = x.new_empty(x.shape[0], max(room, 1 << max(0, end - 1).bit_length()), *x.shape[2:])
        if begin:
            grown[:, :begin] = kept[:, :begin]
        kept = grown
    kept[:, begin:end] = x
    return kept
