# SPDX-License-Identifier: Apache-2.0
"""Gathering of the whole sequence's keys and values on every rank, for selections that read nearly all of them.

A rank owns runs of neighbouring queries. Under a causal mask, a run that ends before token n sees only the first n
keys. The one-device function can therefore compute it, because that function aligns queries to the last of the n keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from dynaxx.derivatives import first_derivative_only
from dynaxx.distributed.exchange import Buffers, Transfer, copy_rows
from dynaxx.distributed.split import SequenceSplit


class Run(NamedTuple):
    """A run of neighbouring queries of a rank, and the keys that it may see."""

    first: int  # first query, as index into own tokens
    last: int  # last query + 1, as index into own tokens
    position: int  # position of the first query in the whole sequence
    keys: int  # the run may see keys 0 to keys - 1


def query_runs(split: SequenceSplit, rank: int, causal: bool = True) -> list[Run]:
    """Return the runs of queries that a rank owns; a rank without tokens has one empty run."""
    runs, done = [], 0
    for a, b in split.runs(rank):
        runs.append(Run(done, done + b - a, a, b if causal else split.seqlen))
        done += b - a
    return runs or [Run(0, 0, 0, 0)]


@lru_cache(maxsize=64)
def reaches(split: SequenceSplit, causal: bool = True) -> tuple[int, ...]:
    """Return for each rank how many tokens of the sequence its queries may see: under a causal mask, not all."""
    return tuple(max(run.keys for run in query_runs(split, rank, causal)) for rank in range(split.ranks))


class WholeGathering:
    """Several tensors of all ranks in transit to one buffer, in sequence order.

    Args:
        parts: tensors (batch, own tokens, heads, dim) with equal heads and dtype.
        split: which rank owns which tokens.
        rank: this rank.
        group: the ranks.
        reach: tokens that each rank gets, counted from the first; None: all. A rank's own tokens must be among them.
        buffers: memory for what arrives; None allocates it.
        turn: which of the buffers to use.
    """

    @torch.no_grad()
    def __init__(
        self,
        parts: tuple[Tensor, ...],
        split: SequenceSplit,
        rank: int,
        group: ProcessGroup,
        reach: Sequence[int] | None = None,
        buffers: Buffers | None = None,
        turn: int = 0,
    ) -> None:
        first = parts[0]
        self.reach = reach = reach or [split.seqlen] * split.ranks
        self._dims = [x.shape[-1] for x in parts]
        shape = (reach[rank], first.shape[0], first.shape[2], sum(self._dims))
        buffers = Buffers() if buffers is None else buffers
        self._buffer = buffer = buffers.take(turn, first, shape)
        others = [other for other in range(split.ranks) if other != rank]
        buffers.open(turn, [source for source in others if cut(split.runs(source), reach[rank])])
        _copy_runs(buffer, parts, split.runs(rank), self._dims)
        sent = [(to, a, b) for to in others for a, b in cut(split.runs(rank), reach[to])]
        sends, places = [(to, buffer[a:b]) for to, a, b in sent], [a * buffer[0].nbytes for _, a, _ in sent]
        receives = [(source, buffer[a:b]) for source in others for a, b in cut(split.runs(source), reach[rank])]
        self._transfer = buffers.exchange(turn, sends, places, receives, group, "gathering keys and values")

    def wait(self) -> list[Tensor]:
        """Return the gathered tensors, each (batch, reached tokens, heads, dim); views of one buffer."""
        self._transfer.wait()
        return list(self._buffer.transpose(0, 1).split(self._dims, dim=-1))


class GatherRuns(torch.autograd.Function):
    """The gathered keys and values, cut to what each run of queries may see.

    Returns (k of run 0, v of run 0, k of run 1, ...). Gradients of all runs are summed and return to the owners.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        gathering: WholeGathering,
        runs: list[Run],
        split: SequenceSplit,
        rank: int,
        group: ProcessGroup,
    ) -> Any:
        ctx.settings = runs, split, rank, group, gathering.reach
        ctx.set_materialize_grads(False)
        ctx.like = k.new_empty(gathering.reach[rank], k.shape[0], k.shape[2], 0)
        ctx.dims = (k.shape[-1], v.shape[-1])
        whole = gathering.wait()
        return tuple(x[:, : run.keys] for run in runs for x in whole)

    @staticmethod
    @first_derivative_only
    @override
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        runs, split, rank, group, reach = ctx.settings
        total = sum_of_runs([(grads[2 * i : 2 * i + 2], run.keys) for i, run in enumerate(runs)], ctx.dims, ctx.like)
        own = ReturningRuns(total, split, rank, group, reach).wait().transpose(0, 1).split(ctx.dims, dim=-1)
        return *own, None, None, None, None, None


def _copy_runs(buffer: Tensor, parts: Sequence[Tensor], runs: Sequence[tuple[int, int]], dims: Sequence[int]) -> None:
    """Copy own tokens to their places in a buffer: two runs of equal length, as in a zigzag, in one copy."""
    if len(runs) == 2 and runs[0][1] - runs[0][0] == runs[1][1] - runs[1][0]:
        (a, b), (c, _) = runs
        shape, strides = (2, b - a, *buffer.shape[1:]), ((c - a) * buffer.stride(0), *buffer.stride())
        both = buffer.as_strided(shape, strides, buffer.storage_offset() + a * buffer.stride(0))
        for own, x in zip(both.split(list(dims), dim=-1), parts, strict=True):
            copy_rows(own, x.transpose(0, 1).unflatten(0, (2, b - a)))
        return
    done = 0
    for a, b in runs:
        for own, x in zip(buffer[a:b].split(list(dims), dim=-1), parts, strict=True):
            copy_rows(own, x[:, done : done + b - a].transpose(0, 1))
        done += b - a


def cut(runs: Sequence[tuple[int, int]], reach: int) -> list[tuple[int, int]]:
    """Return the parts of runs of tokens that lie before token `reach`."""
    return [(a, min(b, reach)) for a, b in runs if a < reach]


def _add_runs(total: Tensor, grads: list[tuple[Tensor, int]]) -> None:
    """Write the sum of gradients of key prefixes into (batch, tokens, heads, dim), starting with the longest prefix."""
    written = 0
    for grad, keys in sorted(grads, key=lambda pair: -pair[1]):
        if written:
            total[:, :keys] += grad
        else:
            total[:, :keys], written = grad, keys
    total[:, written:] = 0


def sum_of_runs(of_runs: Sequence[tuple[Sequence[Tensor | None], int]], dims: Sequence[int], like: Tensor) -> Tensor:
    """Return the sum of the gradients of all runs, (tokens, batch, heads, head_dim + head_dim_v).

    Args:
        of_runs: for each run dk and dv of the keys that it sees, either of which may be None, and their number.
        dims: head_dim and head_dim_v.
        like: a tensor (tokens, batch, heads, anything) of the sum's dtype and device.
    """
    total = like.new_empty(*like.shape[:3], sum(dims))
    for i, part in enumerate(total.transpose(0, 1).split(list(dims), dim=-1)):
        found = ((grads[i], keys) for grads, keys in of_runs)
        _add_runs(part, [(grad, keys) for grad, keys in found if grad is not None])
    return total


class ReturningRuns:
    """Gradients (tokens, ...) of the tokens that this rank gathered, in transit to the ranks that own them.

    Args:
        whole: the gradients.
        split: which rank owns which tokens.
        rank: this rank.
        group: the ranks.
        reach: tokens that each rank gathered, as for `WholeGathering`.
    """

    def __init__(
        self, whole: Tensor, split: SequenceSplit, rank: int, group: ProcessGroup, reach: Sequence[int] | None = None
    ) -> None:
        others, runs = [other for other in range(split.ranks) if other != rank], split.runs(rank)
        reach = reach or [split.seqlen] * split.ranks
        places = {source: [b - a for a, b in cut(runs, reach[source])] for source in others}  # own tokens come in order
        self._received = {source: whole.new_empty(sum(places[source]), *whole.shape[1:]) for source in others}
        receives = [(source, part) for source in others for part in self._received[source].split(places[source])]
        sends = [(to, whole[a:b]) for to in others for a, b in cut(split.runs(to), reach[rank])]
        self._transfer = Transfer(sends, receives, group, "returning gradients of keys and values")
        self._own = torch.cat([whole[:0], *(whole[a:b] for a, b in runs)])

    def wait(self) -> Tensor:
        """Return the sum over ranks for own tokens, (own tokens, ...).

        Ranks are summed in ascending order, in fp32 or better, and the result is rounded once.
        """
        total, received = self._own, self._received
        if len(received) > 1:  # a sum of two is rounded once in any case
            total = total.to(torch.promote_types(total.dtype, torch.float32))
        self._transfer.wait()
        for source in received:
            total[: len(received[source])] += received[source]
        return total.to(self._own.dtype)
