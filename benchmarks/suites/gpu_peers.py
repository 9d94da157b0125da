# SPDX-License-Identifier: Apache-2.0
"""The peers of the GPU suite, each over the same blocks or over all causal pairs, as its own users call it.

A peer is made for a workload and gives a call `(q, k, v) -> out`; it raises `RuntimeError` or `ImportError` where it is
not installed or does not serve the shape, and the suite says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.suites.gpu_workloads import Workload
from torch import Tensor

from dynaxx.layout import BlockLayout, to_block_mask

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Peer = Callable[[Workload, BlockLayout], Run]


def _sdpa(backend: str) -> Peer:
    """Return torch's dense causal attention."""

    def make(workload: Workload, layout: BlockLayout) -> Run:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        if workload.softcap is not None:
            raise RuntimeError("does not cap scores")
        if workload.lengths or not workload.dense_peers:
            raise RuntimeError("dense, and not timed on packed batches and at 128k")

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out: Tensor = scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=workload.causal, enable_gqa=True
                )
            return out.transpose(1, 2)

        return run

    return make


def _flex(workload: Workload, layout: BlockLayout) -> Run:
    """Return FlexAttention with its mask in closed form; on a packed batch by document ids.

    Its own tiles are too large for blocks of 64: there the forward is told tiles of 64, and its backward refuses.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    torch.compiler.reset()  # every workload's mask_mod is another function: the cache would run full
    lists, window, cap = to_block_mask(layout), workload.window, workload.softcap or 0.0
    lengths = torch.tensor(workload.lengths, device=layout.device, dtype=torch.int64)
    document = torch.arange(len(lengths), device=layout.device).repeat_interleave(lengths) if workload.lengths else None

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = q_idx >= kv_idx if workload.causal else q_idx >= 0
        if window is not None:
            seen = seen & (q_idx - kv_idx < window)
        return seen if document is None else seen & (document[q_idx] == document[kv_idx])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    block_mask = BlockMask.from_kv_blocks(
        lists.kv_num_blocks,
        lists.kv_indices,
        lists.full_kv_num_blocks,
        lists.full_kv_indices,
        BLOCK_SIZE=layout.block_size,
        mask_mod=mask_mod,
        seq_lengths=(layout.seqlen_q, layout.seqlen_k),
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    small = min(layout.block_size) < 128
    kernel_options = {"fwd_BLOCK_M": layout.block_size[0], "fwd_BLOCK_N": layout.block_size[1]} if small else None
    options: Any = {"block_mask": block_mask, "enable_gqa": True, "kernel_options": kernel_options}
    if cap:
        options["score_mod"] = score_mod

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.ndim == 3:
            return run(q[None], k[None], v[None])[0]
        by_head = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: Any = compiled(*by_head, **options)
        result: Tensor = out.transpose(1, 2)
        return result

    return run


def _flash_attention_4(workload: Workload, layout: BlockLayout) -> Run:
    """Return FlashAttention 4 with its block sparsity, its window, or its causal mask."""
    from benchmarks.suites.gpu_fa4 import causal_mask
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    if workload.lengths or not workload.causal:
        raise RuntimeError("timed with a causal mask, and not on packed batches")
    options = {} if workload.softcap is None else {"softcap": workload.softcap}
    if workload.density is None:
        window = (None, None) if workload.window is None else (workload.window - 1, 0)
        return lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=window, **options)[0]
    lists = to_block_mask(layout)
    rows = BlockSparseTensorsTorch(
        mask_block_cnt=lists.kv_num_blocks,
        mask_block_idx=lists.kv_indices,
        full_block_cnt=lists.full_kv_num_blocks,
        full_block_idx=lists.full_kv_indices,
        block_size=layout.block_size,
    )
    columns = BlockSparseTensorsTorch(
        mask_block_cnt=lists.q_num_blocks,
        mask_block_idx=lists.q_indices,
        full_block_cnt=lists.full_q_num_blocks,
        full_block_idx=lists.full_q_indices,
        block_size=layout.block_size,
    )
    return lambda q, k, v: flash_attn_func(
        q, k, v, mask_mod=causal_mask, block_sparse_tensors=rows, block_sparse_tensors_bwd=columns, **options
    )[0]


def _cudnn_bsa(workload: Workload, layout: BlockLayout) -> Run:
    """Return cuDNN Frontend's block-sparse attention: as many whole blocks in every row, and equal heads."""
    from cudnn import block_sparse_attention as bsa

    if workload.causal:
        raise RuntimeError("has no causal mask")
    options: Any = {"sparse_block_size": workload.block_size, "layout": "bshd"}
    lists = to_block_mask(layout)
    partial, full = lists.kv_num_blocks, lists.full_kv_num_blocks
    if full is None or int(partial.sum()) or int(full.min()) != int(full.max()):
        raise RuntimeError("timed over whole blocks, as many in every row")
    shape = workload.batch, workload.heads[0], *full.shape[2:], int(full.max())
    indices = lists.full_kv_indices[..., : shape[-1]].expand(shape).int().contiguous()

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = bsa.block_sparse_attention_forward(q, k, v, indices, **options)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, do: Tensor) -> Any:
            return tuple(bsa.block_sparse_attention_backward(do, *ctx.saved_tensors, indices, **options))

    run: Run = Attention.apply
    return run


PEERS: dict[str, Peer] = {
    "fa4": _flash_attention_4,
    "cudnn bsa": _cudnn_bsa,
    "flex": _flex,
    "sdpa cudnn, dense": _sdpa("CUDNN_ATTENTION"),
    "sdpa flash, dense": _sdpa("FLASH_ATTENTION"),
}
