# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention with the sequence split over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.distributed.gather import query_runs, reaches
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.plan import check_stages
from dynaxx.distributed.rules import staged_runs
from dynaxx.distributed.split import SequenceSplit
from dynaxx.trained.nsa.attention import compress
from dynaxx.trained.nsa.attention import native_sparse_attention as attend_on_one_device
from dynaxx.trained.nsa.spans import NsaSizes


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

    Blocks are selected among those of all ranks, so the result equals that of `native_sparse_attention` on one
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
        weights: (cmp_block, kv_heads) weights for k and for v, as for `compress`; the mean by default. Each rank
            gets its part of their gradient; sum it over the ranks.
        scale: softmax scale, default head_dim ** -0.5.
        backend: as for `dynaxx.trained.native_sparse_attention`.
        stages: number of groups of kv heads that are gathered and computed one after another. More stages need less
            memory and more time.

    Returns:
        (batch, own tokens, q_heads, head_dim_v).

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `dynaxx.trained.native_sparse_attention`.
        PeerError: another rank failed.
    """
    rank = dist.get_rank(group_of(mesh))
    split.check_shards(rank, q=q, k=k, v=v, gates=gates)
    runs = query_runs(split, rank)
    whole = runs[0]._replace(keys=reaches(split)[rank])
    check_stages(stages, k.shape[2])
    if q.shape[2] % stages or gates.shape[2] != q.shape[2]:
        raise ValueError(
            f"`q` and `gates` must have equal heads, a multiple of `stages` = {stages}, "
            f"got {q.shape[2]} and {gates.shape[2]}"
        )
    lengths, parts = [run.last - run.first for run in runs], []
    queries, shares = ((x,) if stages == 1 else x.split(x.shape[2] // stages, 2) for x in (q, gates))
    for (some, (all_keys, *seen)), own_q, own_gates in zip(
        staged_runs(k, v, [whole, *runs], split, mesh, stages), queries, shares, strict=True
    ):
        pooling = (None, None) if weights is None else (weights[0][:, some], weights[1][:, some])
        k_cmp, v_cmp = (compress(x, sizes, how) for x, how in zip(all_keys, pooling, strict=True))
        outs = []
        for run, (keys, values), q_run, gates_run in zip(
            runs, seen, _pieces(own_q, lengths, 1), _pieces(own_gates, lengths, 1), strict=True
        ):
            count = sizes.compressed(run.keys)
            compressed = k_cmp[:, :count], v_cmp[:, :count]
            outs.append(
                attend_on_one_device(q_run, keys, values, compressed, gates_run, sizes, scale=scale, backend=backend)
            )
        parts.append(_joined(outs, 1))
    return _joined(parts, 2)


def _pieces(x: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    """Split a tensor. Its gradient is then one concatenation; the gradient of each slice would fill a whole tensor."""
    return (x,) if len(sizes) == 1 else x.split(sizes, dim)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
