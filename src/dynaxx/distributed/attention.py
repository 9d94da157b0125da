# SPDX-License-Identifier: Apache-2.0
"""`sparse_attention` with the sequence split over ranks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dynaxx.arguments import typed
from dynaxx.distributed.by_layout.backward import split_backward
from dynaxx.distributed.by_layout.forward import PlannedCall, split_forward
from dynaxx.distributed.call import Call, attend
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.plan import ExchangePlan, plan_exchange
from dynaxx.distributed.sharded import ShardedLayout
from dynaxx.distributed.split import SequenceSplit
from dynaxx.layout import BlockLayout
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.checks import follow_autocast

Splits = SequenceSplit | tuple[SequenceSplit, SequenceSplit]


@typed
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | ShardedLayout,
    mesh: Mesh,
    *,
    split: Splits | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    stages: int | None = None,
) -> Tensor | SparseAttentionOutput:
    """Attend from this rank's queries to the keys of all ranks, exactly, over the blocks of `layout`. Differentiable.

    Every rank of the mesh calls this function with its own tokens, as returned by `SequenceSplit.shard`. Gradients of
    keys and values return to the rank that owns them, so all ranks must also run the backward pass.

    Args:
        q: (batch, own tokens, q_heads, head_dim); packed (own tokens, q_heads, head_dim). Under `torch.autocast`, q, k
            and v are cast to its dtype.
        k: (batch, own tokens, kv_heads, head_dim); packed without batch.
        v: (batch, own tokens, kv_heads, head_dim_v); packed without batch.
        layout: layout of the whole sequence, equal on all ranks; or this rank's rows of it, from `ShardedLayout.of` or
            `select_split_blocks`, which include the split.
        mesh: the ranks that share the sequence, as a one-dimensional DeviceMesh or a process group.
        split: which rank owns which tokens, the split that made the shards; required unless the layout includes it. A
            pair (queries, keys) if queries and keys are split differently.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: as for `dynaxx.sparse_attention`.
        sinks: as for `dynaxx.sparse_attention`. Each rank gets its part of the gradient; sum it over the ranks, like
            the gradient of any parameter.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: as for `dynaxx.sparse_attention`.
        stages: number of groups of kv heads that are exchanged and computed one after another, a divisor of kv_heads.
            More stages need less memory. None means as many as keep messages large, at most 8.

    Returns:
        out (batch, own tokens, q_heads, head_dim_v), or (out, lse) with lse (batch, q_heads, own tokens); packed
        without batch.

    Raises:
        ValueError, TypeError: the inputs do not match each other, or differ between ranks.
        UnsupportedInputError: no backend, or not the named one, can serve the call.
        PeerError: another rank failed, or did not answer within the group's timeout.
    """
    group = group_of(mesh)
    q, k, v = follow_autocast(q, k, v)
    packed = q.ndim == 3
    if packed:
        q, k, v = q[None], k[None], v[None]
    plan = _plan_of(q, k, v, layout, group, split, stages)
    options = Call.options(q, k, v, scale=scale, softcap=softcap, sinks=sinks, return_lse=return_lse, backend=backend)
    call = PlannedCall(group, **options, plan=plan)
    found = attend(split_forward, split_backward, q, k, v, call, return_lse=return_lse)
    if not packed:
        return found
    return found[0] if isinstance(found, Tensor) else SparseAttentionOutput(found.out[0], found.lse[0])


def _plan_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | ShardedLayout,
    group: ProcessGroup,
    split: Splits | None,
    stages: int | None,
) -> ExchangePlan:
    """Check the shards and return the plan, once per layout and form of shards: a call waits for both on the host."""
    known = _planned.get(layout) if isinstance(layout, BlockLayout | ShardedLayout) else None
    key = (group.group_name, split, q.shape, k.shape, v.shape, k.dtype, q.device, stages)
    plan = None if known is None else known.get(key)
    if plan is None:
        sharded = shard_layout(layout, group, split)
        _check_shards(q, k, v, sharded)
        plan = plan_exchange(sharded, group, q.shape[2], k.shape[2], _token_bytes(k, v), stages)
        _planned.setdefault(layout, {})[key] = plan
    return plan


def shard_layout(layout: BlockLayout | ShardedLayout, group: ProcessGroup, split: Splits | None) -> ShardedLayout:
    """Return this rank's rows of a layout, cached with the layout.

    Raises:
        TypeError: `layout` is neither a BlockLayout nor a ShardedLayout, or `split` is missing.
        ValueError: `split` is given for a ShardedLayout, or does not match the layout or the group.
    """
    if isinstance(layout, ShardedLayout):
        if split is not None:
            raise ValueError("`split` must be omitted for a ShardedLayout, which contains its split")
        _check_ranks(layout, group)
        return layout
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"`layout` must be a BlockLayout or a ShardedLayout, got {type(layout).__name__}")
    if split is None:
        raise TypeError(
            "`split` must be the split that made these shards; others of the same shapes give other results: "
            "sequence_split(layout, mesh), or SequenceSplit.contiguous(seqlen, ranks, chunk) for consecutive "
            "runs of whole chunks, each with the method `shard`"
        )
    q_split, kv_split = split if isinstance(split, tuple) else (split, split)
    rank = dist.get_rank(group)
    known = _sharded.setdefault(layout, {})
    if (q_split, kv_split, rank) not in known:
        known[q_split, kv_split, rank] = ShardedLayout.of(layout, q_split, rank, kv_split)
    _check_ranks(known[q_split, kv_split, rank], group)
    return known[q_split, kv_split, rank]


@typed
def exchange_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | ShardedLayout,
    mesh: Mesh,
    *,
    split: Splits | None = None,
    stages: int | None = None,
) -> ExchangePlan:
    """Return the plan of what `sparse_attention` sends and receives for these shards. All ranks must call it.

    Args:
        q: queries, as for `sparse_attention`.
        k: keys, as for `sparse_attention`.
        v: values, as for `sparse_attention`.
        layout: as for `sparse_attention`.
        mesh: the ranks that share the sequence.
        split: which rank owns which tokens.
        stages: number of groups of kv heads, as for `sparse_attention`.
    """
    group = group_of(mesh)
    sharded = shard_layout(layout, group, split)
    return plan_exchange(sharded, group, q.shape[-2], k.shape[-2], _token_bytes(k, v), stages)


def _token_bytes(k: Tensor, v: Tensor) -> int:
    """Return the bytes of one token's key and value in one kv head, over the batch."""
    return (k.shape[-1] + v.shape[-1]) * k.itemsize * (k.shape[0] if k.ndim == 4 else 1)


def _check_shards(q: Tensor, k: Tensor, v: Tensor, sharded: ShardedLayout) -> None:
    wanted = {"q": sharded.q_split, "k": sharded.kv_split, "v": sharded.kv_split}
    for (name, split), x in zip(wanted.items(), (q, k, v), strict=True):
        if x.ndim != 4:
            raise ValueError(
                f"`{name}` must be (batch, own tokens, heads, head_dim), without batch if packed, got {tuple(x.shape)}"
            )
        if x.shape[1] != split.length(sharded.rank):
            raise ValueError(
                f"`{name}` must have the {split.length(sharded.rank)} tokens that rank {sharded.rank} owns "
                f"(use split.shard(x, rank)), got {x.shape[1]}"
            )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q_heads must be a multiple of kv_heads, both >= 1, got {q.shape[2]} and {k.shape[2]}")
    if sharded.rows.layout_heads not in (1, q.shape[2]) or sharded.rows.layout_batch not in (1, q.shape[0]):
        raise ValueError(
            f"`layout` must be shared or for batch {q.shape[0]} and {q.shape[2]} q heads, "
            f"got batch {sharded.rows.layout_batch} and {sharded.rows.layout_heads} heads"
        )
    if sharded.device != q.device:
        raise ValueError(f"`layout` must be on q's device {q.device}, got {sharded.device}; use layout.to(q.device)")


def _check_ranks(sharded: ShardedLayout, group: ProcessGroup) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if (sharded.q_split.ranks, sharded.rank) != (ranks, rank):
        raise ValueError(
            f"`split` must be for the {ranks} ranks of the mesh and `layout` for rank {rank}, "
            f"got {sharded.q_split.ranks} ranks and rank {sharded.rank}"
        )


_sharded: WeakKeyDictionary[BlockLayout, dict[Any, ShardedLayout]] = WeakKeyDictionary()
_planned: WeakKeyDictionary[BlockLayout | ShardedLayout, dict[Any, ExchangePlan]] = WeakKeyDictionary()
