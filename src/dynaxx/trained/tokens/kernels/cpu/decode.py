# SPDX-License-Identifier: Apache-2.0
"""A decoding step over chosen tokens on the CPU: pass the cache to the core. `tokens_decode.cpp` has the structure."""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from dynaxx.core.structures import raise_for_status, structure
from dynaxx.kernels.decode.cpu import _cache_args, _exact_args, _library
from dynaxx.kernels.runtime.core_arguments import ELEMENTS, readable, strides
from dynaxx.layout.host import address, on_host
from dynaxx.layout.paging import PagedCache

TokenDecodeArgs = structure("TokenDecodeArgs")


@on_host
def attend_tokens(
    q: Tensor,
    cache: PagedCache,
    block_indices: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, as `kernels.tokens.reference.attention`. Every dtype is widened in the core."""
    batch, seqlen_q, q_heads, _ = q.shape
    q, chosen = readable(q), block_indices.contiguous()
    logits = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
    out = q.new_empty(batch, seqlen_q, q_heads, cache.head_dim_v, dtype=torch.float32)
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    arguments, _kept = _cache_args(cache)
    args = TokenDecodeArgs(
        ctypes.pointer(arguments),
        address(q, q.dtype, (cache.batch, seqlen_q, q_heads, cache.head_dim), strided=True),
        ELEMENTS[q.dtype],
        strides(q),
        seqlen_q,
        q_heads,
        chosen.shape[2],
        address(chosen, torch.int32, (batch, seqlen_q, *chosen.shape[2:])),
        chosen.shape[3],
        block_size,
        address(out, torch.float32, out.shape),
        address(lse, torch.float32, lse.shape),
        scale,
        softcap or 0.0,
        None if logits is None else address(logits, torch.float32, (q_heads,)),
        torch.get_num_threads(),
        *_exact_args(cache.exact),
    )
    raise_for_status(_library().dynaxx_cpu_token_decode(byref(args)))
    return out.to(q.dtype), lse
