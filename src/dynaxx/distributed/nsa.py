# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention with the sequence split over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.distributed.gather import query_runs
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.rules import staged_runs
from dynaxx.distributed.split import SequenceSplit
from dynaxx.layout.nsa import NsaSizes
from dynaxx.ops.nsa import compress
from dynaxx.ops.nsa import native_sparse_attention as attend_on_one_device


@typed
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    sizes: NsaSizes,
    split: SequenceSplit,
    mesh: Mesh,
    *,
    weights: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    backend: str = "auto",
    stages: int = 1,
) -> Tensor:
    """Attend from this rank's queries to compressed tokens, selected blocks and a window of the whole sequence.

    Blocks are selected among those of all ranks, so the result equals that of `dynaxx.native_sparse_attention` on one
    device. Every rank gathers all keys and values and compresses them, because a rank's queries together select nearly
    all blocks. Differentiable; gradients of keys and values return to their owners.

    Args:
        q: (batch, own tokens, q_heads, head_dim).
        k: (batch, own tokens, kv_heads, head_dim).
        v: (batch, own tokens, kv_heads, head_dim_v).
        gates: (batch, own tokens, q_heads, 3).
        sizes: sizes of the branches.
        split: which rank owns which tokens. Zigzag balances the compressed branch, whose work grows with the position.
        mesh: the ranks, as for `dynaxx.distributed.sparse_attention`.
        weights: (cmp_block, kv_heads) weights for k and for v, as for `dynaxx.compress`; the mean by default. Each rank
            gets its part of their gradient; sum it over the ranks.
        scale: softmax scale, default head_dim ** -0.5.
        backend: as for `dynaxx.native_sparse_attention`.
        stages: number of groups of kv heads that are gathered and computed one after another. More stages need less
            memory and more time.

    Returns:
        (batch, own tokens, q_heads, head_dim_v).

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `dynaxx.native_sparse_attention`.
        PeerError: another rank failed.
    """
    rank = dist.get_rank(group_of(mesh))
    split.check_shards(rank, q=q, k=k, v=v, gates=gates)
    runs = query_runs(split, rank)
    whole = runs[0]._replace(keys=split.seqlen)
    heads, kv_heads = q.shape[2], k.shape[2]
    parts = []
    for some, (all_keys, *seen) in staged_runs(k, v, [whole, *runs], split, mesh, stages):
        q_heads = slice(some.start * heads // kv_heads, some.stop * heads // kv_heads)
        pooling = (None, None) if weights is None else (weights[0][:, some], weights[1][:, some])
        k_cmp, v_cmp = (compress(x, sizes, how) for x, how in zip(all_keys, pooling, strict=True))
        outs = []
        for run, (keys, values) in zip(runs, seen, strict=True):
            own, count = slice(run.first, run.last), sizes.compressed(run.keys)
            outs.append(
                attend_on_one_device(
                    q[:, own, q_heads],
                    keys,
                    values,
                    (k_cmp[:, :count], v_cmp[:, :count]),
                    gates[:, own, q_heads],
                    sizes,
                    scale=scale,
                    backend=backend,
                )
            )
        parts.append(torch.cat(outs, 1))
    return torch.cat(parts, 2)
