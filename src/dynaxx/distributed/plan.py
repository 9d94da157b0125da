# SPDX-License-Identifier: Apache-2.0
"""`ExchangePlan`: which keys and values each rank sends and receives for one sharded layout.

A rank computes its rows over a buffer that holds own tokens and received tokens. The kv heads may be processed in
stages to save memory: while one stage is computed, the keys and values of the next are in transit. The ranks exchange
bitmaps of the blocks they need once, so that every message has a known size and needs no header.

Legend: R ranks; Hn groups of heads with different needs (1 if all heads share a layout, else kv heads); C kv blocks of
the whole sequence.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from dynaxx.distributed.group import peer_errors
from dynaxx.distributed.sharded import ShardedLayout, split_columns, split_rows, with_columns
from dynaxx.layout import BlockLayout

MAX_STAGES, STAGE_BYTES = 8, 16 << 20
WHOLE_SHARE = 0.8  # if a rank needs at least this share of a peer's tokens, sending all is cheaper than packing some


@dataclass(frozen=True, eq=False)
class Sent:
    """Own tokens that are sent to one rank: a contiguous run, or a list of indices."""

    first: int  # first token of the run, as index into own tokens
    tokens: int  # number of tokens
    index: Tensor | None = None  # (tokens,) int64, indices into own tokens; None for a run


@dataclass(frozen=True, eq=False)
class Stage:
    """The exchange and the layouts for some kv heads.

    If few rows visit blocks of other ranks, as under a window, only these edge rows are computed over the buffer. The
    inner rows are computed over own keys and values, without waiting for the exchange.
    """

    kv_heads: tuple[int, int]  # first, last + 1
    q_heads: tuple[int, int]  # first, last + 1
    layout: BlockLayout  # own queries, or only those in `rows`, over the tokens of the buffer
    own: tuple[int, int]  # (first, last + 1) of own tokens in the buffer
    own_tokens: Sent  # the own tokens that the buffer holds
    sends: dict[int, Sent]  # by receiving rank
    received: dict[int, tuple[int, int]]  # by sending rank: (first, last + 1) of its tokens in the buffer
    places: dict[int, int] = field(default_factory=dict)  # by receiving rank: first place of own tokens in its buffer
    rows: Tensor | None = None  # (n,) int64, own queries of edge rows; None: all queries are computed together
    run: slice | None = None  # the same queries, if they are neighbours
    inner: BlockLayout | None = None  # own queries over own tokens; edge rows are empty
    rest: tuple[slice, BlockLayout] | None = None  # the queries that are not in `run`, if neighbours, and their layout
    halves: tuple[BlockLayout, BlockLayout] | None = None  # of the first stage: over own tokens, and over received ones

    @property
    def tokens(self) -> int:
        """Number of tokens in the buffer."""
        return self.layout.seqlen_k


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """The stages of one rank: what it sends, receives and computes."""

    stages: tuple[Stage, ...]  # of the forward pass
    backward_stages: tuple[Stage, ...]
    most_tokens: int = 0  # of the largest buffer of any rank, times its kv heads
    ran: set[Hashable] = field(default_factory=set)  # shapes and settings of forward passes that have run

    def bytes_sent(self, k: Tensor, v: Tensor) -> int:
        """Return how many bytes this rank sends in a forward pass for shards like these."""
        return sent_tokens(self.stages) * _token_bytes(k, v)

    def bytes_received(self, k: Tensor, v: Tensor) -> int:
        """Return how many bytes this rank receives in a forward pass for shards like these."""
        return received_tokens(self.stages) * _token_bytes(k, v)

    def backward_bytes_sent(self, k: Tensor, v: Tensor) -> int:
        """Return how many bytes this rank sends in a backward pass: keys and values again, and gradients to owners."""
        return (sent_tokens(self.backward_stages) + received_tokens(self.backward_stages)) * _token_bytes(k, v)


def sent_tokens(stages: tuple[Stage, ...]) -> int:
    """Return how many tokens a rank sends, summed over kv heads and receivers."""
    return sum(_heads(stage) * sum(sent.tokens for sent in stage.sends.values()) for stage in stages)


def received_tokens(stages: tuple[Stage, ...]) -> int:
    """Return how many tokens a rank receives, summed over kv heads."""
    return sum(_heads(stage) * sum(b - a for a, b in stage.received.values()) for stage in stages)


def plan_exchange(
    sharded: ShardedLayout, group: ProcessGroup, q_heads: int, kv_heads: int, token_bytes: int, stages: int | None
) -> ExchangePlan:
    """Return the plan of this rank, cached with the layout. All ranks of the group must call it.

    Args:
        sharded: this rank's rows.
        group: the ranks.
        q_heads: number of q heads.
        kv_heads: number of kv heads.
        token_bytes: bytes of one token's key and value in one kv head, over the batch.
        stages: number of groups of kv heads, a divisor of kv_heads. None means as many as keep messages large, if a
            rank receives many tokens, and otherwise 1 (`stages_of`).

    Raises:
        ValueError: the ranks disagree on the split, the heads or the block size; raised on every rank.
        PeerError: another rank failed.
    """
    key = (group.group_name, q_heads, kv_heads, token_bytes, stages)
    known = _plans.setdefault(sharded, {})
    if key not in known:
        known[key] = _make(sharded, group, q_heads, kv_heads, token_bytes, stages)
    return known[key]


def _make(
    sharded: ShardedLayout, group: ProcessGroup, q_heads: int, kv_heads: int, token_bytes: int, stages: int | None
) -> ExchangePlan:
    own_needs = _needs(sharded, kv_heads)
    _check_agreement(sharded, group, (q_heads, kv_heads, token_bytes, stages or 0, own_needs.shape[0]))
    with peer_errors("announcing the blocks it needs", group):
        needs = _gathered(own_needs, group)  # (R, Hn, C)
    places = _Places(sharded, needs.cpu().numpy())
    if stages is not None:
        check_stages(stages, kv_heads)
    count = stages
    if count is None:
        received = places.received_tokens()
        much = 4 * received > sharded.kv_split.seqlen // sharded.kv_split.ranks
        count = stages_of(kv_heads, received * token_bytes) if much else 1
    made = _stages(sharded, places, q_heads, kv_heads, count)
    return _with_places(made, group, sharded.device)


def _with_places(stages: tuple[Stage, ...], group: ProcessGroup, device: torch.device) -> ExchangePlan:
    """Return the plan, after all ranks have said where they receive which tokens."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    own = torch.tensor(
        [[_heads(s) * s.tokens, *(s.received.get(source, (-1, -1))[0] for source in range(ranks))] for s in stages],
        dtype=torch.int64,
        device=device,
    )
    with peer_errors("announcing where it receives tokens", group):
        said = _gathered(own, group).cpu().tolist()  # (R, stages, 1 + R)
    made = tuple(
        replace(stage, places={to: said[to][i][1 + rank] for to in stage.sends}) for i, stage in enumerate(stages)
    )
    return ExchangePlan(made, made, max(of_stage[0] for of_rank in said for of_stage in of_rank))


def check_stages(stages: int, kv_heads: int) -> None:
    """Reject a number of stages that does not divide the number of kv heads.

    Raises:
        ValueError: it does not.
    """
    if stages < 1 or kv_heads % stages:
        raise ValueError(f"`stages` must divide kv_heads = {kv_heads}, got {stages}")


def stages_of(kv_heads: int, head_bytes: int) -> int:
    """Return the number of stages for an exchange: at most 8, with at least 16 MiB per stage.

    While one stage is computed, the next is in transit, so only the first exchange takes time of its own.

    Args:
        kv_heads: number of kv heads.
        head_bytes: bytes that a rank receives for one kv head.
    """
    counts = [n for n in range(1, MAX_STAGES + 1) if kv_heads % n == 0 and kv_heads // n * head_bytes >= STAGE_BYTES]
    return max(counts, default=1)


def _stages(sharded: ShardedLayout, places: _Places, q_heads: int, kv_heads: int, count: int) -> tuple[Stage, ...]:
    step, group_size = kv_heads // count, q_heads // kv_heads
    shared = sharded.rows.layout_heads == 1
    made: dict[bytes, Stage] = {}  # stages of a shared layout that need the same blocks are equal
    found = []
    for first in range(0, kv_heads, step):
        groups = slice(0, 1) if shared else slice(first, first + step)
        needs = np.logical_or.reduce(places.needs[:, groups], axis=1)
        heads: dict[str, Any] = {
            "kv_heads": (first, first + step),
            "q_heads": (first * group_size, (first + step) * group_size),
        }
        key = needs.tobytes()
        rows = sharded.rows if shared else sharded.rows.head_slice(range(*heads["q_heads"]))
        if key not in made or not shared:
            made[key] = _stage(rows, needs, places, heads)
        found.append(replace(made[key], **heads))
        if count > 1 and not first and found[0].inner is None:
            found[0] = replace(found[0], halves=_halves(rows, needs, places))
    return tuple(found)


def _halves(rows: BlockLayout, needs: NDArray[np.bool_], places: _Places) -> tuple[BlockLayout, BlockLayout]:
    """Return the layouts of the same rows over own tokens, and over the tokens of other ranks in the buffer."""
    own_blocks = places.own[places.rank]
    order = places.messages(needs, own_blocks).order
    own, others = split_columns(rows, own_blocks)
    return (
        with_columns(own, own_blocks, places.tokens(own_blocks)),
        with_columns(others, order, places.tokens(order)),
    )


def _stage(rows: BlockLayout, needs: NDArray[np.bool_], places: _Places, heads: dict[str, Any]) -> Stage:
    """Return the stage for a layout of own rows; `needs` is (R, C)."""
    own_blocks = places.own[places.rank]
    split = split_rows(rows, own_blocks, places.tokens(own_blocks))
    parts = places.messages(needs, own_blocks if split is None else split.own_blocks)
    if split is None:
        return Stage(layout=with_columns(rows, parts.order, places.tokens(parts.order)), **parts.fields(), **heads)
    layout = with_columns(split.edge, parts.order, places.tokens(parts.order))
    own: dict[str, Any] = {"rows": split.rows, "run": split.run, "inner": split.inner, "rest": split.rest}
    return Stage(layout=layout, **own, **parts.fields(), **heads)


class _Messages(NamedTuple):
    order: NDArray[np.int64]  # kv blocks in the buffer
    own: tuple[int, int]  # this and the following fields as in `Stage`
    own_tokens: Sent
    sends: dict[int, Sent]
    received: dict[int, tuple[int, int]]

    def fields(self) -> dict[str, Any]:
        """Return the fields that a `Stage` shares."""
        return {name: value for name, value in self._asdict().items() if name != "order"}


class _Places:
    """Owners, needs and positions of kv blocks. On the host."""

    def __init__(self, sharded: ShardedLayout, needs: NDArray[np.bool_]) -> None:
        self.split, self.rank, self.block = sharded.kv_split, sharded.rank, sharded.rows.block_size[1]
        self.device = sharded.device
        self.own = [self.split.blocks(rank, self.block).numpy() for rank in range(self.split.ranks)]
        self.needs = self._whole_where_cheaper(needs.astype(np.bool_))

    def _whole_where_cheaper(self, needs: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mark all of a peer's blocks as needed if nearly all are, so that they can be sent without packing."""
        for owner, blocks in enumerate(self.own):
            if len(blocks):
                share = needs[:, :, blocks].mean(-1)
                rank, head = (share >= WHOLE_SHARE).nonzero()
                needs[rank[:, None], head[:, None], blocks[None]] = True
            needs[owner, :, blocks] = False
        return needs

    def received_tokens(self) -> int:
        """Return the largest number of tokens that a rank receives in one head."""
        return int(self.needs.sum(-1).max()) * self.block if self.needs.size else 0

    def tokens(self, blocks: NDArray[np.int64]) -> int:
        """Return the number of tokens in these blocks; the last block of the sequence may be short."""
        short = len(blocks) > 0 and blocks[-1] == self.needs.shape[2] - 1
        return len(blocks) * self.block - (-self.split.seqlen % self.block if short else 0)

    def messages(self, needs: NDArray[np.bool_], own_blocks: NDArray[np.int64]) -> _Messages:
        """Return the contents of the buffer, and the messages to and from each rank.

        Args:
            needs: (R, C).
            own_blocks: own blocks that the buffer holds, ascending.
        """
        ranks = [rank for rank in range(self.split.ranks) if rank != self.split.last_owner] + [self.split.last_owner]
        order, received, own, done = [], {}, (0, 0), 0
        for source in ranks:  # the owner of the short block comes last: kernels allow a short block only at the end
            blocks = own_blocks if source == self.rank else self.own[source][needs[self.rank, self.own[source]]]
            span = (done, done + self.tokens(blocks))
            done = span[1]
            order.append(blocks)
            if source == self.rank:
                own = span
            elif len(blocks):
                received[source] = span
        slots = np.searchsorted(self.own[self.rank], own_blocks)
        sends = {}
        for to in range(self.split.ranks):
            wanted = needs[to, self.own[self.rank]].nonzero()[0]
            if to != self.rank and len(wanted):
                sends[to] = self._sent(wanted)
        return _Messages(np.concatenate(order), own, self._sent(slots), sends, received)

    def _sent(self, slots: NDArray[np.int64]) -> Sent:
        """Return the own tokens of some own blocks, given by their indices among own blocks."""
        tokens = self.tokens(self.own[self.rank][slots])
        if not len(slots) or slots[-1] - slots[0] + 1 == len(slots):
            return Sent(int(slots[0]) * self.block if len(slots) else 0, tokens)
        index = (slots[:, None] * self.block + np.arange(self.block)).ravel()[:tokens]
        return Sent(0, tokens, torch.from_numpy(index).to(self.device))


def _needs(sharded: ShardedLayout, kv_heads: int) -> Tensor:
    """Return the kv blocks that this rank's rows visit, (Hn, C) uint8."""
    rows = sharded.rows
    groups = 1 if rows.layout_heads == 1 else kv_heads
    found = torch.zeros(groups * max(1, rows.kv_blocks), dtype=torch.uint8, device=rows.device)
    flat_rows, cols, _ = rows.entries()
    if groups > 1:
        head = flat_rows // max(1, rows.q_blocks) % rows.layout_heads
        cols = cols + head // (rows.layout_heads // groups) * rows.kv_blocks
    found[cols] = 1
    return found.view(groups, -1)


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather x from every rank, (R, ...)."""
    found = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(found.unbind(0)), x.contiguous(), group=group)
    return found


def _check_agreement(sharded: ShardedLayout, group: ProcessGroup, numbers: tuple[int, ...]) -> None:
    """Raise ValueError on every rank if their splits, blocks or heads differ."""
    split, rows = sharded.kv_split, sharded.rows
    said = (digest(sharded.q_split), digest(split), *rows.block_size, rows.layout_batch, *numbers)
    own = torch.tensor(said, dtype=torch.int64, device=sharded.device)
    with peer_errors("comparing splits", group):
        all_said = _gathered(own, group).tolist()
    wrong = [rank for rank, other in enumerate(all_said) if other != all_said[0]]
    if wrong:
        raise ValueError(
            "`layout` and `split` must be the same on all ranks, with the same heads, dtypes and stages; "
            f"rank {wrong[0]} has {all_said[wrong[0]]}, but rank 0 has {all_said[0]} "
            "(q split, kv split, blocks, batch, heads, bytes per token, stages, groups of heads)"
        )


def digest(split: Any) -> int:
    """Return a hash that is equal for equal splits in every process."""
    from hashlib import blake2b

    text = repr((split.seqlen, split.chunk, split.owners, split.ranks)).encode()
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "big")


def _token_bytes(k: Tensor, v: Tensor) -> int:
    return k.shape[0] * (k.shape[-1] * k.itemsize + v.shape[-1] * v.itemsize)


def _heads(stage: Stage) -> int:
    return stage.kv_heads[1] - stage.kv_heads[0]


_plans: WeakKeyDictionary[ShardedLayout, dict[Hashable, ExchangePlan]] = WeakKeyDictionary()
