# SPDX-License-Identifier: Apache-2.0
"""The forward pass of attention: call the core, or gather in torch."""

from __future__ import annotations

from ctypes import CDLL

import torch
from torch import Tensor

from dynaxx.core.library import active_library
from dynaxx.core.structures import raise_for_status
from dynaxx.kernels.attention.cpu import gather
from dynaxx.kernels.attention.cpu.plan import plan_of
from dynaxx.kernels.bias import table_of
from dynaxx.kernels.runtime.core_arguments import bias_of_core, forward_args, readable
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import never_traced


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, N, Hq, E) in q's dtype and lse (B, Hq, N), natural log, in fp32; both contiguous.

    q (B, N, Hq, D), k (B, M, Hk, D) and v (B, M, Hk, E) may have any strides, but a tensor whose last dimension is not
    contiguous is copied. The core widens fp16 and bf16, computes in fp32 and rounds once. It runs on
    `torch.get_num_threads()` threads. A given `out`, of that shape and dtype, receives the result.
    """
    library, bias = active_library(), table_of(bias, q.shape[1], k.shape[1])
    if out is not None and not out.is_contiguous():
        found, lse = attention_forward(q, k, v, layout, scale, softcap, sinks, bias=bias)
        return out.copy_(found), lse
    if library is None:
        found, lse = gather.attention_forward(q, k, v, layout, scale, softcap, sinks, bias)
        return (found if out is None else out.copy_(found)), lse
    return _core_forward(library, readable(q), readable(k), readable(v), layout, scale, softcap, sinks, out, bias)


@never_traced
def _core_forward(
    library: CDLL,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, q_heads, _ = q.shape
    if out is None:
        out = q.new_empty((batch, seqlen_q, q_heads, v.shape[3]))
    assert out.is_contiguous(), "`out` must be contiguous"
    assert (out.dtype, out.shape) == (q.dtype, (batch, seqlen_q, q_heads, v.shape[3])), "`out` must fit q and v"
    lse = q.new_empty((batch, q_heads, seqlen_q), dtype=torch.float32)
    plan = plan_of(layout, library)  # stays alive until the core is done, even if another thread changes the layout
    logits = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
    biases = None if bias is None else bias_of_core(bias, scale, softcap)
    args = forward_args(q, k, v, out, lse, plan.struct, scale, softcap, logits, biases)
    code = library.dynaxx_cpu_forward(args)
    if code:
        raise_for_status(code)
    return out, lse
