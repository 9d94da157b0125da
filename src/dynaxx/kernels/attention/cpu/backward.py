# SPDX-License-Identifier: Apache-2.0
"""The backward pass of attention: call the core, or use autograd through the gathers in torch."""

from __future__ import annotations

from ctypes import CDLL, byref

import torch
from torch import Tensor

from dynaxx.core.library import active_library
from dynaxx.core.structures import raise_for_status
from dynaxx.kernels.attention.cpu import gather
from dynaxx.kernels.attention.cpu.plan import plan_of
from dynaxx.kernels.bias import add_gradient, table_of
from dynaxx.kernels.runtime.core_arguments import (
    ELEMENTS,
    BackwardArgs,
    bias_of_core,
    readable,
    strides,
)
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import address, never_traced, on_host

WAVE_TOKENS = 4096  # tokens per thread in a wave of short heads; with fewer, threads would wait at the end of a wave
LOW_SHARE = 0.1  # upper bound for the memory of low halves of sums, as a share of all tensors
LOW_BYTES = 2 << 20  # lower limit of that bound


@on_host
def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtype and shape of q, k, v.

    The gradients have tokens or heads outermost in memory, like q, k and v. do (B, N, Hq, E) is the gradient of out;
    dlse (B, Hq, N) is that of lse, or None; out and lse are the results of the forward pass. Any strides. Sums have a
    fixed order, so the result is bitwise equal for any number of threads.
    """
    if bias is not None and bias.ndim == 2:  # slopes: compute with their table
        table = table_of(bias, q.shape[1], k.shape[1])
        sums = None if dbias is None or table is None else torch.zeros_like(table)
        grads = attention_backward(do, dlse, q, k, v, out, lse, layout, scale, softcap, table, sums)
        if dbias is not None and sums is not None:
            add_gradient(dbias, sums, q.shape[1], k.shape[1])
        return grads
    library = active_library()
    if library is None:
        return gather.attention_backward(do, dlse, q, k, v, out, lse, layout, scale, softcap, bias, dbias)
    do, q, k, v, out = (readable(x) for x in (do, q, k, v, out))
    return _core_backward(library, do, q, k, v, out, lse, dlse, layout, scale, softcap, bias, dbias)


@never_traced
def _core_backward(
    library: CDLL,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    layout: BlockLayout,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    dbias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen_q, q_heads, head_dim = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    threads = torch.get_num_threads()
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.float().contiguous()
    dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
    wave, part = heads_at_a_time(q, v, threads)
    halves = q.dtype != torch.float32
    parts = halves and part < q_heads // kv_heads
    delta = lse.new_empty(wave, part, seqlen_q)
    turns = lse.new_empty(wave, part, layout.q_blocks + 1, dtype=torch.int32)
    dq_low = q.new_empty(wave, part, seqlen_q, head_dim) if halves else None
    dk_low, dv_low = (x.new_empty(wave, *x.shape[1::2]) if parts else None for x in (k, v))
    biases = None if bias is None else bias_of_core(bias.flip(-1), scale, softcap)
    bias_sums = None if biases is None or dbias is None else torch.zeros_like(biases)
    plan = plan_of(layout, library, rows_are_keys=True)
    named = {"q": q, "k": k, "v": v, "out": out, "grad": do, "dq": dq, "dk": dk, "dv": dv}
    of_q, of_k = (batch, layout.seqlen_q, q_heads), (batch, layout.seqlen_k, kv_heads)
    shapes = {name: (*of_q, head_dim) for name in ("q", "dq")} | {name: (*of_q, head_dim_v) for name in ("out", "grad")}
    shapes |= {name: (*of_k, head_dim) for name in ("k", "dk")} | {name: (*of_k, head_dim_v) for name in ("v", "dv")}
    halves_of = {"dq_low": dq_low, "dk_low": dk_low, "dv_low": dv_low}
    of_bias = {"bias": biases, "bias_grad": bias_sums}
    args = BackwardArgs(
        **{name: address(x, q.dtype, shapes[name], strided=True) for name, x in named.items()},
        **{name: None if x is None else address(x, q.dtype, x.shape) for name, x in halves_of.items()},
        **{name: None if x is None else address(x, torch.float32, x.shape) for name, x in of_bias.items()},
        **{f"{name}_strides": strides(x) for name, x in named.items()},
        element=ELEMENTS[q.dtype],
        lse=address(lse, torch.float32, (batch, q_heads, seqlen_q)),
        lse_grad=None if dlse is None else address(dlse, torch.float32, lse.shape),
        delta=address(delta, torch.float32, delta.shape),
        turns=address(turns, torch.int32, turns.shape),
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        plan=plan.pointer,
        scale=scale,
        softcap=softcap or 0.0,
        threads=threads,
        wave=wave,
        part=part,
    )
    raise_for_status(library.dynaxx_cpu_backward(byref(args)))
    if dbias is not None and bias_sums is not None:
        dbias += bias_sums[..., : dbias.shape[-1]].flip(-1)
    return dq, dk, dv


def heads_at_a_time(q: Tensor, v: Tensor, threads: int) -> tuple[int, int]:
    """Return how many kv heads to process together, and how many q heads of each one's group.

    By default, one kv head per thread (more if heads are short), with all q heads of its group. For bf16 and fp16,
    fewer heads if the low halves of sums would take too much memory. In the extreme, one q head at a time: dk and dv
    then need low halves too, but dq needs them for one head only.
    """
    batch, seqlen_q, q_heads, head_dim = q.shape
    kv_heads, head_dim_v = v.shape[2:]
    group_size = q_heads // kv_heads
    wave, part = max(threads, WAVE_TOKENS * threads // max(1, group_size * seqlen_q)), group_size
    if q.dtype != torch.float32:
        tensors = 2 * q.itemsize * (q.numel() + v.numel()) * (1 + head_dim_v / head_dim)
        allowed = max(LOW_BYTES, LOW_SHARE * tensors)
        low = q.itemsize * group_size * seqlen_q * head_dim
        low_in_parts = q.itemsize * (seqlen_q * head_dim + v.shape[1] * (head_dim + head_dim_v))
        if low > allowed and low_in_parts < low:
            low, part = low_in_parts, 1
        wave = min(wave, int(allowed // max(1, low)))
    return max(1, min(wave, batch * kv_heads)), part


def _empty_like(x: Tensor) -> Tensor:
    """Allocate a tensor with the shape and dtype of x, with tokens or heads outermost in memory, like x."""
    if x.stride(1) >= x.stride(2):
        return x.new_empty(x.shape)
    batch, seqlen, heads, head_dim = x.shape
    return x.new_empty(batch, heads, seqlen, head_dim).transpose(1, 2)
