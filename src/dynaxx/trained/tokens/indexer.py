# SPDX-License-Identifier: Apache-2.0
"""The indexer of DeepSeek-V3.2, which chooses the tokens of each query, and its loss against dense attention."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import first_derivative_only, refuse_transforms
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.host import never_traced
from dynaxx.layout.packed import CuSeqlens
from dynaxx.ops.flops import count, is_counting
from dynaxx.trained.registry import INDEX_LOSS, INDEXER
from dynaxx.trained.tokens.attention import check_block_size, check_choice
from dynaxx.trained.tokens.choice import TopKTokens, check_queries_and_keys
from dynaxx.trained.tokens.kernels.contract import IndexerKernels, IndexerProblem, IndexLossCall, IndexLossProblem
from dynaxx.trained.tokens.spans import TokenSpans, sequence_ends

Precision = Literal["fp32", "bf16", "fp8", "int8"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_serving = lru_cache(maxsize=256)(INDEXER.resolve)
_serving_loss = lru_cache(maxsize=256)(INDEX_LOSS.resolve)


@never_traced
@typed
@torch.no_grad()
def index_tokens(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    choice: TopKTokens,
    *,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    precision: Precision = "fp32",
    backend: str = "auto",
) -> Tensor:
    """Choose tokens for each query by an indexer's scores, sum over heads h of weight[h] * relu(q[h] . k).

    Scores are not stored, so memory is linear in the number of keys. Only the order of scores matters, so a scale
    above 0 has no effect.

    Args:
        index_q: (batch, seqlen_q, index_heads, index_dim), aligned to the last keys; packed without batch.
        index_k: (batch, seqlen_k, index_dim): all heads share it.
        index_weights: (batch, seqlen_q, index_heads), of any sign.
        choice: the number of tokens, and of neighbours that are chosen together; the score of a block is that of its
            best visible token.
        cu_seqlens_q: packed inputs only: (num_seqs + 1,) cumulative lengths from 0.
        cu_seqlens_k: packed inputs only: cumulative lengths of the keys; defaults to `cu_seqlens_q`.
        precision: the dtype to which q and k are rounded before they are multiplied: "fp32", "bf16", or "fp8" (e4m3)
            and "int8" with a scale per row. Products are added up in fp32. Tensor cores add fp8 products with about 14
            bits, so scores that agree to 14 bits may be ranked either way.
        backend: "auto", or "hopper", "triton", "cpu", "reference".

    Returns:
        block_indices (batch, seqlen_q, 1, choice.slots) int32, packed without batch, for `selected_attention`:
        ascending, with -1 at the end. Of equal scores the earlier block wins. NaN ranks first, as for `torch.topk`.

    Raises:
        ValueError, TypeError: inputs that do not fit together.
        UnsupportedInputError: no backend, or not the named one, can serve.
    """
    refuse_transforms(
        "`index_tokens`", index_q, index_k, index_weights, fix="choose outside of the transformed function"
    )
    spans = _check_indexer(index_q, index_k, index_weights, cu_seqlens_q, cu_seqlens_k, choice.block_size)
    if precision not in ("fp32", "bf16", "fp8", "int8"):
        raise ValueError(f"`precision` must be 'fp32', 'bf16', 'fp8' or 'int8', got {precision!r}")
    flat = (lambda x: x.flatten(0, 1)) if index_q.ndim == 4 else (lambda x: x)
    q, k, weights = flat(index_q), flat(index_k), flat(index_weights)
    dtype = DTYPES.get(precision, q.dtype if k.dtype == q.dtype else torch.float32)
    problem = IndexerProblem(q.device, dtype, len(q), q.shape[1], q.shape[2], choice.block_size, choice.slots)
    name = _serving(problem, backend)
    kernels = INDEXER.kernels(name)
    if name != "reference" and is_counting():
        lengths = zip(pairwise(spans.ends_q), pairwise(spans.ends_k), strict=True)
        seen = sum(sum(range(max(0, k1 - k0 - q1 + q0 + 1), k1 - k0 + 1)) for (q0, q1), (k0, k1) in lengths)
        count(2 * seen * q.shape[1] * q.shape[2])
    chosen = kernels.index_tokens(*_rounded(q, k, weights, precision, kernels), spans, choice.slots)
    return chosen.unflatten(0, index_q.shape[:2]) if index_q.ndim == 4 else chosen


def _rounded(
    q: Tensor, k: Tensor, weights: Tensor, precision: Precision, kernels: IndexerKernels
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k and weights in the precision asked for, and the scale of each key in 8 bits."""
    if precision == "fp32":
        return q, k, weights, None
    if precision == "bf16":
        return q.bfloat16(), k.bfloat16(), weights, None
    to_8_bits = kernels.to_fp8 if precision == "fp8" else kernels.to_int8
    (q8, q_scale), (k8, k_scale) = to_8_bits(q), to_8_bits(k)
    return q8, k8, weights.float() * q_scale, k_scale  # a scale above 0 passes through relu


class IndexLoss(NamedTuple):
    """The result of `index_loss`.

    Attributes:
        loss: scalar, the mean over queries of KL(attention || indexer). Differentiable in the indexer's inputs.
        recall: scalar, the mean share of attention that falls on the keys in `block_indices`; 1 without them.
    """

    loss: Tensor
    recall: Tensor


@never_traced
@typed
def index_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    k: Tensor,
    *,
    block_indices: Tensor | None = None,
    block_size: int = 1,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    scale: float | None = None,
    index_scale: float | None = None,
    backend: str = "auto",
) -> IndexLoss:
    """Return the divergence between dense attention and the softmax of an indexer's scores, to train the indexer.

    The target is attention averaged over all q heads. Without `block_indices` it covers all keys (the dense warm-up of
    DeepSeek-V3.2). With them, target and softmax are renormalised to the keys that each query chose (its sparse stage).
    A few queries are processed at a time, so memory is linear in the number of keys, forward and backward. On a GPU,
    q and k are multiplied in their dtype, as in attention, and gradients in the dtype of `index_q` and `index_k`.

    Args:
        index_q: (batch, seqlen_q, index_heads, index_dim); packed without batch.
        index_k: (batch, seqlen_k, index_dim).
        index_weights: (batch, seqlen_q, index_heads).
        q: (batch, seqlen_q, q_heads, head_dim), of attention. It gets no gradient.
        k: (batch, seqlen_k, kv_heads, head_dim), of attention. It gets no gradient.
        block_indices: (batch, seqlen_q, 1, slots) integers: the blocks to which each query attends, each once.
        block_size: tokens per block of `block_indices`.
        cu_seqlens_q: packed inputs only: (num_seqs + 1,) cumulative lengths from 0.
        cu_seqlens_k: packed inputs only: cumulative lengths of the keys; defaults to `cu_seqlens_q`.
        scale: softmax scale of attention, default head_dim ** -0.5.
        index_scale: of the indexer's scores, default (index_dim * index_heads) ** -0.5.
        backend: "auto", or "triton", "reference".

    Returns:
        The loss and the recall of the choice.

    Raises:
        ValueError, TypeError: inputs that do not fit together.
        UnsupportedInputError: the named backend cannot serve.
    """
    refuse_transforms("`index_loss`", index_q, index_k, index_weights)
    check_block_size(block_size)
    spans = _check_indexer(index_q, index_k, index_weights, cu_seqlens_q, cu_seqlens_k, block_size)
    before = tuple(index_q.shape[:-2])
    if q.ndim != index_q.ndim or k.ndim != q.ndim:
        raise ValueError(f"`q` and `k` must have {index_q.ndim} dimensions, as `index_q`, got {q.ndim} and {k.ndim}")
    batched = (lambda x: x) if index_q.ndim == 4 else (lambda x: x[None])
    check_queries_and_keys(batched(q), batched(k))
    if q.shape[:-2] != before or k.shape[:-2] != index_k.shape[:-1]:
        raise ValueError(
            "`q` and `k` must be of the tokens that the indexer has, "
            f"got {tuple(q.shape)} and {tuple(k.shape)} beside {tuple(index_q.shape)} and {tuple(index_k.shape)}"
        )
    if q.device != index_q.device:
        raise ValueError(f"`q` must be on the indexer's device {index_q.device}, got {q.device}")
    if block_indices is not None:
        check_choice(block_indices, before, q.shape[-2], k.shape[-2], q.device)
        if block_indices.shape[-2] != 1:
            raise ValueError(f"`block_indices` must have one select_head here, got {block_indices.shape[-2]}")
        block_indices = block_indices.flatten(0, -2)
    heads, dim = index_q.shape[-2:]
    scales = (softmax_scale(scale, q.shape[-1]), softmax_scale(index_scale, dim * heads, "index_scale"))
    flat = (lambda x: x.flatten(0, 1)) if index_q.ndim == 4 else (lambda x: x)
    inputs = [flat(x) for x in (index_q, index_k, index_weights, q.detach(), k.detach())]
    dtypes = [torch.promote_types(a.dtype, b.dtype) for a, b in (inputs[3:], inputs[:2])]
    problem = IndexLossProblem(q.device, dtypes[0], q.shape[-1], dtypes[1], heads, dim)
    kernels = INDEX_LOSS.kernels(_serving_loss(problem, backend))
    loss, recall = _IndexLoss.apply(*inputs, block_indices, spans, *scales, kernels)
    return IndexLoss(loss, recall)


class _IndexLoss(torch.autograd.Function):
    """Compute the loss and its gradients together, without storing scores."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        kernels, call = given[-1], IndexLossCall._make((*given[:-1], any(ctx.needs_input_grad[:3])))
        with torch.autocast(call.q.device.type, enabled=False):  # pieces multiply in fp32 at least
            total, covered, grads = kernels.index_loss(call)
        ctx.save_for_backward(*grads)
        ctx.count, ctx.dtypes = max(1, call.q.shape[0]), [x.dtype for x in call[:3]]
        recall = covered / ctx.count
        ctx.mark_non_differentiable(recall)
        return total / ctx.count, recall

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((grad * (dloss / ctx.count)).to(dtype) for grad, dtype in pairs), *(None,) * 7


def _check_indexer(
    q: Tensor, k: Tensor, weights: Tensor, ends_q: CuSeqlens | None, ends_k: CuSeqlens | None, block_size: int
) -> TokenSpans:
    """Check the inputs of an indexer, and return the positions of their sequences.

    Raises:
        ValueError, TypeError: they do not fit together.
    """
    if q.ndim not in (3, 4) or k.ndim != q.ndim - 1 or weights.shape != q.shape[:-1]:
        raise ValueError(
            "`index_q` must be (batch, seqlen_q, index_heads, index_dim), `index_k` (batch, seqlen_k, index_dim) and "
            "`index_weights` (batch, seqlen_q, index_heads), all packed without batch, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(weights.shape)}"
        )
    if q.shape[-1] != k.shape[-1] or not q.shape[-1] or not q.shape[-2] or (q.ndim == 4 and q.shape[0] != k.shape[0]):
        raise ValueError(
            "`index_q` and `index_k` must agree in batch and index_dim, with one head at least, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if not all(x.is_floating_point() for x in (q, k, weights)):
        raise TypeError(f"an indexer's inputs must be floats, got {q.dtype}, {k.dtype} and {weights.dtype}")
    if not q.device == k.device == weights.device:
        raise ValueError(f"an indexer's inputs must be on one device, got {q.device}, {k.device}, {weights.device}")
    return TokenSpans(*sequence_ends(q, k, ends_q, ends_k, batched=q.ndim == 4), block_size)
