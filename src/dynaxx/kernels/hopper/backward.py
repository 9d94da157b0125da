"""Block-sparse attention backward for Hopper: in one pass (`backward_joint`), or dq apart from dk and dv.

One pass for kv blocks of 128 and enough of them, unless torch is to use deterministic algorithms. Two passes are dq
(`backward_dq`), over the layout, and dk and dv (`backward_dkv`), over its transpose: no atomics, the same bits in every
run. TMA clips at the ends of each sequence, so tiles need no bound checks; queries past the end have lse = inf and give
nothing. Shapes: B batch, N / M queries and keys, Hq / Hk query and kv heads, D head_dim.
"""

import torch
from torch import Tensor

from dynaxx.kernels.hopper.backward_dkv import backward_dkv
from dynaxx.kernels.hopper.backward_dq import backward_dq
from dynaxx.kernels.hopper.backward_joint import backward_joint
from dynaxx.kernels.hopper.backward_rows import dq_of_sums, rows_and_sums, rows_of
from dynaxx.kernels.hopper.config import backward_in_one_pass
from dynaxx.kernels.hopper.launch import dense_rows
from dynaxx.kernels.triton.launch import processors, zeros_like_lse
from dynaxx.layout import BlockLayout


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
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.triton.attention_backward`."""
    if out.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    do, q, k, v, out = (dense_rows(x) for x in (do, q, k, v, out))
    dlse = zeros_like_lse(lse, layout) if dlse is None else dlse
    programs = layout.kv_blocks * k.shape[0] * k.shape[2]
    if not torch.are_deterministic_algorithms_enabled() and backward_in_one_pass(
        layout.block_size[1], q.shape[3], programs, processors(k.device)
    ):
        lse_log2, delta, sums = rows_and_sums(do, out, dlse, lse, layout)
        dk, dv = backward_joint(do, q, k, v, lse_log2, delta, sums, layout, scale, softcap)
        return dq_of_sums(sums, q, layout, scale), dk, dv
    tensors = (do, q, k, v, *rows_of(do, out, dlse, lse, layout))
    options = (layout, scale, softcap)
    return backward_dq(*tensors, *options), *backward_dkv(*tensors, *options)
